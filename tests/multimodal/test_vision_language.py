"""Language models with images equal transformers' own forward: positions of three axes, prefixes seen both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from anypool import LLM
from anypool.adapters.processors import load_processor
from anypool.errors import ConfigError, InvalidParameterError, InvalidPromptError, PromptTooLongError
from anypool.model_executor.models.transformers_backend import Way
from anypool.model_executor.weights.repository import Repository
from tests.helpers import assert_close, loaded, vectors
from tests.multimodal import checkpoints
from tests.multimodal.checkpoints import picture

# PaliGemma's processor makes numpy arrays of tensors in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FAMILIES = ("gemma3", "idefics3", "llava", "llava_next", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
PICTURES = [picture(1), picture(2, 60, 90)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Any, Any]]:
    """The engine, transformers' model without its head, and its processor."""
    folder = getattr(checkpoints, f"{request.param}_folder")()
    model = hf.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with loaded(folder) as llm:
        yield llm, model.model, load_processor(Repository.open(str(folder)))


def states(model: Any, processor: Any, text: str, images: Sequence[Any]) -> torch.Tensor:
    """`[L, D]` last hidden states by the library."""
    if images:
        inputs = processor(text=[text], images=[list(images)], return_tensors="pt")
    else:
        inputs = processor.tokenizer([text], return_tensors="pt", return_token_type_ids=False)
    inputs.pop("labels", None)
    with torch.no_grad():
        found: torch.Tensor = model(**inputs)[0][0]
    return found


def around(mark: str) -> str:
    """An image's placeholder with what Qwen has around it."""
    return f"<|vision_start|>{mark}<|vision_end|>" if mark == "<|image_pad|>" else mark


def prompt(text: str, *images: Any) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}} if images else text


def test_ragged_batches_of_texts_and_images_equal_transformers(family: Any) -> None:
    llm, model, processor = family
    mark = processor.image_token
    cases = [
        ("a cat", ()),
        (f"a cat{mark}on a mat", PICTURES[:1]),
        (f"{mark}and{mark}x", (PICTURES[1], PICTURES[0])),
        ("a long story of a cat that sat on a mat", ()),
        (around(mark) * 2, (PICTURES[0], PICTURES[0])),
        (f"{mark}z", PICTURES[1:]),
        ("z", ()),
    ]
    prompts = [prompt(text, *images) for text, images in cases]
    expected = [states(model, processor, text, images) for text, images in cases]
    assert_close(vectors(llm, prompts), F.normalize(torch.stack([one[-1] for one in expected])))
    by_token = llm.token_embed(prompts, use_tqdm=False)
    for output, one in zip(by_token, expected, strict=True):
        assert_close(output.outputs.data, F.normalize(one))


def test_a_batch_changes_nothing(family: Any) -> None:
    llm, _, processor = family
    prompts = ["a cat", prompt(f"a {processor.image_token}", PICTURES[0]), "a mat that is long", "x"]
    alone = torch.cat([vectors(llm, [one]) for one in prompts])
    assert_close(vectors(llm, prompts), alone, atol=1e-6)


def test_images_stand_before_a_text_that_does_not_place_them(family: Any) -> None:
    llm, model, processor = family
    mark = processor.image_token
    placed = around(mark)
    found = vectors(llm, [prompt("a cat", PICTURES[0]), {"multi_modal_data": {"image": PICTURES[0]}}])
    expected = [states(model, processor, placed + text, PICTURES[:1])[-1] for text in ("a cat", "")]
    assert_close(found, F.normalize(torch.stack(expected)))


def test_the_vision_tower_runs_once_per_distinct_image(family: Any) -> None:
    llm, _, processor = family
    backbone: Any = llm.engine.loaded.model
    mark, new = processor.image_token, picture(55)
    before = backbone.features.computed
    prompts = [prompt(f"{mark}a cat", new), prompt(f"a mat{mark}", new), "text", prompt(f"{mark}", new)]
    first = vectors(llm, prompts)
    again = vectors(llm, prompts)
    assert backbone.features.computed == before + 1
    assert torch.equal(first, again)


def test_texts_run_packed(family: Any) -> None:
    llm, _, _ = family
    backbone: Any = llm.engine.loaded.model
    assert backbone.way is Way.PACKED


def test_prompts_whose_images_do_not_fit_their_text_are_refused(family: Any) -> None:
    llm, _, processor = family
    mark = processor.image_token
    with pytest.raises(InvalidPromptError, match="input 1 has 1 images, and its text 2 times"):
        llm.embed(["x", prompt(f"{mark}{mark}", PICTURES[0])])
    if mark == "<|image_pad|>":  # whose positions would be those of one image
        with pytest.raises(InvalidPromptError, match="side by side"):
            llm.embed(prompt(f"{mark}{mark}", *PICTURES))
    with pytest.raises(InvalidPromptError, match="input 1 has the model's image token"):
        llm.embed(["x", f"a {mark}"])
    with pytest.raises(PromptTooLongError, match="with its images"):
        llm.embed(prompt(f"{mark}" + "long " * 120, PICTURES[0]), truncate_prompt_tokens=-1)
    with pytest.raises(InvalidParameterError, match="not before images"):
        llm.embed(prompt(mark, PICTURES[0]), prompt="query: ")


def test_prefix_caching_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        LLM(checkpoints.llava_folder(), enable_prefix_caching=True)


def test_positions_of_three_axes_count() -> None:
    """The vector is another one where an image of as many tokens has another shape."""
    folder = checkpoints.qwen2_vl_folder()
    flat, high = picture(5, 56, 28), picture(5, 28, 56)
    model = hf.Qwen2VLModel.from_pretrained(folder).eval()
    processor = load_processor(Repository.open(str(folder)))
    text = "<|vision_start|><|image_pad|><|vision_end|>a cat"
    with loaded(folder) as llm:
        found = vectors(llm, [prompt(text, flat), prompt(text, high)])
    expected = [states(model, processor, text, [one]) for one in (flat, high)]
    assert len(expected[0]) == len(expected[1])
    assert_close(found, F.normalize(torch.stack([one[-1] for one in expected])))
    inputs = processor(text=[text], images=[[high]], return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None])[0][0, -1]
    assert (F.normalize(plain, dim=0) - found[1]).abs().max() > 1e-3

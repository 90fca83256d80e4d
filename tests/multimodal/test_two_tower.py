"""CLIP and SigLIP equal transformers and sentence-transformers, texts and images in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules.clip_model import CLIPModel

from anypool import LLM, PoolingParams
from anypool.errors import InvalidPromptError, ModelLoadError, PromptTooLongError, UnsupportedTaskError
from tests.helpers import assert_close, edit_json, loaded, new_folder, vectors
from tests.multimodal.checkpoints import clip_folder, picture, siglip_folder

TEXTS = ["a cat", "a dog sat on a long mat", "x", "the end of a story"]
PICTURES = [picture(1), picture(2, 60, 90), picture(3, 28, 28)]


def image(given: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"image": given}}


FAMILIES = {
    "clip": (clip_folder, hf.CLIPModel, hf.CLIPProcessor, {"padding": True}),
    "clip-old": (lambda: clip_folder(2), hf.CLIPModel, hf.CLIPProcessor, {"padding": True}),
    "siglip": (siglip_folder, hf.SiglipModel, hf.SiglipProcessor, {"padding": "max_length", "max_length": 40}),
}
FAMILIES["clip"] = (lambda: clip_folder(3), *FAMILIES["clip"][1:])


@pytest.fixture(scope="module", params=list(FAMILIES))
def towers(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, torch.Tensor, torch.Tensor]]:
    """The engine, and transformers' embeddings of the texts and of the images."""
    folder, model_cls, processor_cls, padding = FAMILIES[request.param]
    model = model_cls.from_pretrained(folder()).eval()
    processor = processor_cls.from_pretrained(folder())
    texts = processor(text=TEXTS, return_tensors="pt", **padding)
    if request.param == "siglip":
        texts.pop("attention_mask")  # it was trained to attend to the padding
    with torch.no_grad():
        of_texts = model.get_text_features(**texts).pooler_output
        pixels = [processor(images=one, return_tensors="pt") for one in PICTURES]
        of_images = torch.cat([model.get_image_features(**one).pooler_output for one in pixels])
    with loaded(folder()) as llm:
        yield llm, of_texts, of_images


def test_texts_and_images_in_one_batch_equal_transformers(towers: Any) -> None:
    llm, of_texts, of_images = towers
    mixed = [TEXTS[0], image(PICTURES[0]), TEXTS[1], image(PICTURES[1]), image(PICTURES[2]), TEXTS[2], TEXTS[3]]
    found = vectors(llm, mixed)
    assert_close(found[[0, 2, 5, 6]], F.normalize(of_texts))
    assert_close(found[[1, 3, 4]], F.normalize(of_images), atol=1e-4)
    raw = vectors(llm, mixed, PoolingParams(normalize=False))
    assert_close(raw[[0, 2, 5, 6]], of_texts)


def test_more_tokens_than_a_text_may_have_fit_into_a_batch(towers: Any) -> None:
    llm, of_texts, _ = towers
    found = vectors(llm, TEXTS * 5)
    assert_close(found, F.normalize(of_texts).repeat(5, 1))


def test_a_batch_changes_nothing(towers: Any) -> None:
    llm, _, _ = towers
    mixed = [TEXTS[1], image(PICTURES[0]), TEXTS[0], image(PICTURES[2])]
    alone = torch.cat([vectors(llm, [prompt]) for prompt in mixed])
    assert_close(vectors(llm, mixed), alone, atol=1e-6)


def test_an_image_that_comes_again_does_not_run_again(towers: Any) -> None:
    llm, _, _ = towers
    features: Any = llm.engine.loaded.model
    new = picture(77)
    before = features.features.computed
    first, second, third = vectors(llm, [image(new), image(new.copy()), image(numpy.asarray(new))])
    vectors(llm, [image(new)])
    assert features.features.computed == before + 1
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_an_image_is_scored_against_texts(towers: Any) -> None:
    llm, of_texts, of_images = towers
    scores = llm.score(image(PICTURES[0]), TEXTS, use_tqdm=False)
    expected = F.cosine_similarity(of_images[:1], of_texts)
    assert_close(torch.tensor([float(one.outputs.score) for one in scores]), expected, atol=1e-4)
    ranked = llm.rerank(TEXTS[0], [image(one) for one in PICTURES], use_tqdm=False)
    best = F.cosine_similarity(of_texts[:1], of_images).argmax()
    assert ranked[0].index == int(best)
    assert ranked[0].document == image(PICTURES[int(best)])


def test_tasks_and_prompts_that_have_no_meaning_are_refused(towers: Any) -> None:
    llm, _, _ = towers
    assert llm.supported_tasks == ("embed",)
    with pytest.raises(UnsupportedTaskError):
        llm.token_embed("a cat")
    with pytest.raises(InvalidPromptError, match="reads one or the other"):
        llm.embed({"prompt": "a cat", **image(PICTURES[0])})
    with pytest.raises(InvalidPromptError, match="2 images"):
        llm.embed(image(PICTURES[:2]))
    with pytest.raises(PromptTooLongError):
        llm.embed("a cat " * 40)
    assert vectors(llm, ["a cat " * 40]).shape[0] == 1


@pytest.mark.parametrize("module", ["CLIPModel", "Transformer", "normalized"])
def test_folders_of_sentence_transformers_give_their_vectors(module: str) -> None:
    first = CLIPModel(str(clip_folder(3))) if module == "CLIPModel" else Transformer(str(clip_folder(3)))
    reference = SentenceTransformer(
        modules=[first, Normalize()] if module == "normalized" else [first], device="cpu", prompts={"q": "a "}
    )
    folder = new_folder("sentence-transformers-clip")
    reference.save(str(folder), create_model_card=False)
    if module == "CLIPModel":  # older versions put the model into a folder of its own
        _move_into(folder, "0_CLIPModel")
    with loaded(folder) as llm:
        found = vectors(llm, [*TEXTS, *map(image, PICTURES)])
        named = vectors(llm, TEXTS[:2], prompt_name="q")
    expected = [reference.encode(TEXTS), reference.encode(PICTURES)]
    assert_close(found, torch.from_numpy(numpy.concatenate(expected)), atol=1e-4)
    assert_close(named, torch.from_numpy(reference.encode(TEXTS[:2], prompt_name="q")))


def sentence_transformers_folder(folder: Path, **settings: Any) -> Path:
    found = new_folder("sentence-transformers-towers")
    modules = [Transformer(str(folder))]
    SentenceTransformer(modules=modules, device="cpu").save(str(found), create_model_card=False)
    edit_json(found / "sentence_bert_config.json", lambda config: config.update(settings))
    return found


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("length", [None, 12], ids=["full length", "12 tokens"])
def test_settings_for_texts_are_those_of_sentence_transformers(family: str, length: int | None) -> None:
    full = {"clip": 48, "siglip": 40}[family]
    text = {"padding": "max_length", "max_length": length or full}
    folder = sentence_transformers_folder(
        FAMILIES[family][0](), do_lower_case=True, processing_kwargs={"text": text, "image": {}}
    )
    # The tokenizer of a real SigLIP gives no mask, so that padding is attended to.
    names = ["input_ids"] if family == "siglip" else ["input_ids", "attention_mask"]
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_input_names=names))
    texts = ["A CAT on a Mat", "x", "the end of a long story " * 9]
    reference = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        found = vectors(llm, texts, truncate_prompt_tokens=-1)
    assert_close(found, torch.from_numpy(reference.encode(texts)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processing_kwargs": {"image": {"do_rescale": False}}}, "processing_kwargs for image; supported"),
        ({"processing_kwargs": {"text": {"stride": 2}, "common": {"a": 1}}}, "processing_kwargs for common, stride"),
        ({"max_seq_length": "12"}, "max_seq_length '12', not a positive integer"),
    ],
    ids=["images", "texts", "length"],
)
def test_settings_that_are_not_known_are_refused(settings: dict[str, Any], message: str) -> None:
    folder = sentence_transformers_folder(clip_folder(3), **settings)
    with pytest.raises(ModelLoadError, match=message):
        LLM(folder, device="cpu")


def _move_into(folder: Path, name: str) -> None:
    import json

    kept = ("modules.json", "config_sentence_transformers.json")
    moved = [path for path in folder.iterdir() if path.name not in kept]
    (folder / name).mkdir()
    for path in moved:
        path.rename(folder / name / path.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0] |= {"path": name, "type": "sentence_transformers.models.CLIPModel"}
    (folder / "modules.json").write_text(json.dumps(modules))

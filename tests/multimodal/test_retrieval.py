"""ColPali, ColQwen2 and ColModernVBERT equal transformers: vectors of queries and of pages, and MaxSim of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf

from anypool import LLM
from anypool.errors import InvalidPromptError, PromptTooLongError, UnsupportedArchitectureError, UnsupportedTaskError
from anypool.pooling.tasks import PoolingTask
from tests.helpers import assert_close, copy_of, edit_json, loaded
from tests.multimodal import checkpoints
from tests.multimodal.checkpoints import picture

QUERIES = ["what is it", "a cat on a mat and more of it", "x"]
PAGES = [picture(1), picture(2, 60, 90), picture(3, 80, 20)]
FAMILIES = {
    "colmodernvbert": (hf.ColModernVBertForRetrieval, hf.ColModernVBertProcessor),
    "colpali": (hf.ColPaliForRetrieval, hf.ColPaliProcessor),
    "colqwen2": (hf.ColQwen2ForRetrieval, hf.ColQwen2Processor),
}


def page(image: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"image": image}}


@pytest.fixture(scope="module", params=list(FAMILIES))
def retriever(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[torch.Tensor], list[torch.Tensor], Any]]:
    """The engine, the library's vectors of the queries and of the pages, and its processor."""
    folder = getattr(checkpoints, f"{request.param}_folder")()
    model_cls, processor_cls = FAMILIES[request.param]
    model, processor = model_cls.from_pretrained(folder).eval(), processor_cls.from_pretrained(folder)
    queries = [_vectors(model, processor.process_queries([query])) for query in QUERIES]
    pages = [_vectors(model, processor.process_images([one])) for one in PAGES]
    with loaded(folder) as llm:
        yield llm, queries, pages, processor


def _vectors(model: Any, inputs: Any) -> torch.Tensor:
    inputs.pop("labels", None)
    extra = {}
    if "image_grid_thw" in inputs:  # the model is trained with these positions, and its class takes them
        types = (inputs["input_ids"] == model.config.vlm_config.image_token_id).int()
        positions, _ = model.vlm.get_rope_index(inputs["input_ids"], types, inputs["image_grid_thw"])
        extra["position_ids"] = positions
    with torch.no_grad():
        found: torch.Tensor = model(**inputs, **extra).embeddings[0]
    return found


def test_queries_and_pages_in_one_batch_equal_transformers(retriever: Any) -> None:
    llm, queries, pages, _ = retriever
    mixed = [QUERIES[0], page(PAGES[0]), page(PAGES[1]), QUERIES[1], page(PAGES[2]), QUERIES[2]]
    expected = [queries[0], pages[0], pages[1], queries[1], pages[2], queries[2]]
    for output, one in zip(llm.token_embed(mixed, use_tqdm=False), expected, strict=True):
        assert_close(output.outputs.data, one)


def test_a_query_finds_pages_by_maxsim(retriever: Any) -> None:
    llm, queries, pages, processor = retriever
    expected = processor.score_retrieval(queries, pages)
    for query, row in zip(QUERIES, expected, strict=True):
        scores = llm.score(query, [page(one) for one in PAGES], use_tqdm=False)
        assert_close(torch.tensor([float(one.outputs.score) for one in scores]), row, atol=1e-4)
    ranked = llm.rerank(QUERIES[1], [page(one) for one in PAGES], use_tqdm=False)
    assert [one.index for one in ranked] == expected[1].argsort(descending=True).tolist()


def test_what_the_model_does_not_read_is_refused(retriever: Any) -> None:
    llm, _, _, _ = retriever
    assert llm.supported_tasks == ("token_embed",)
    with pytest.raises(UnsupportedTaskError):
        llm.embed("a cat")
    with pytest.raises(InvalidPromptError, match="reads one or the other"):
        llm.token_embed({"prompt": "a cat", **page(PAGES[0])})
    with pytest.raises(PromptTooLongError):
        llm.token_embed("long " * 200)


def test_a_long_query_is_cut_and_its_last_tokens_stay(retriever: Any) -> None:
    llm, _, _, processor = retriever
    [output] = llm.token_embed("a cat on a mat and more of it", truncate_prompt_tokens=30, use_tqdm=False)
    whole = processor.process_queries(["a cat on a mat and more of it"])["input_ids"][0].tolist()
    assert len(output.prompt_token_ids) == 30
    assert output.prompt_token_ids[-10:] == whole[-10:]
    assert output.num_truncated_tokens == len(whole) - 30


@pytest.mark.parametrize("name", ["ColGemma3", "ColQwen3", "BiPali", "BiQwen2"])
def test_other_classes_of_colpali_engine_are_refused(name: str) -> None:
    folder = copy_of(checkpoints.paligemma_folder())
    edit_json(folder / "config.json", lambda config: {**config, "architectures": [name]})
    with pytest.raises(UnsupportedArchitectureError, match="a class of colpali-engine"):
        LLM(folder)


def test_threads_prepare_queries_and_pages_at_once() -> None:
    """transformers' tokenizers raise "Already borrowed" where two threads set them."""
    prompts = [*QUERIES, page(PAGES[0])] * 3
    with loaded(checkpoints.colpali_folder()) as llm, ThreadPoolExecutor(4) as pool:

        def prepare(_: int) -> list[list[int]]:
            return [one.token_ids for one in llm.engine.prepare(prompts, PoolingTask.TOKEN_EMBED)]

        first, *others = pool.map(prepare, range(12))
    assert all(ids == first for ids in others)

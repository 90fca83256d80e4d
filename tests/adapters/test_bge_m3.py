"""BGE-M3: three kinds of vectors from one run, and their fused score.

The reference is the published formulas of FlagEmbedding's `EncoderOnlyEmbedderM3Model`, in plain torch over
transformers' own XLM-RoBERTa. The package itself needs others that do not go with the versions tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from anypool import LLM, PoolingParams
from anypool.errors import (
    CheckpointFormatError,
    InvalidParameterError,
    InvalidPromptError,
    NonFiniteResultError,
    UnsupportedTaskError,
)
from anypool.outputs import MultiTaskOutput
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    copy_of,
    loaded,
    save,
    save_sentence_transformer,
    tiny_llama,
    wordpiece_tokenizer,
)

TASKS = ["embed", "sparse_embed", "token_embed"]
TEXTS = [*RAGGED, "the cat sat", "a story"]
UNUSED = [2, 3, 0, 1]  # [CLS], [SEP], [PAD], [UNK]


@cache
def bge_m3(*, with_modules: bool = True) -> Path:
    """An XLM-RoBERTa with the two heads beside it, as FlagEmbedding saves them: in float16."""
    torch.manual_seed(8)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS - 2, eos_token="[SEP]")
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
    )
    backbone = save(transformers.XLMRobertaModel(config), tokenizer, "bge-m3")
    folder = save_sentence_transformer(backbone, Pooling(HIDDEN, "cls"), Normalize()) if with_modules else backbone
    for name, size in (("sparse_linear.pt", 1), ("colbert_linear.pt", 24)):
        linear = torch.nn.Linear(HIDDEN, size).half()
        torch.save(linear.state_dict(), folder / name)
    return folder


@cache
def expected(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Dense, sparse and token vectors of each text by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.XLMRobertaModel.from_pretrained(folder).eval()
    heads = {name: torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")}

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, heads[name]["weight"].float(), heads[name]["bias"].float())

    found = []
    for text in TEXTS:
        batch = tokenizer(text, return_tensors="pt", truncation=True)
        with torch.no_grad():
            [hidden] = model(**batch).last_hidden_state
        weights = linear("sparse", hidden).relu()[:, 0]
        lexical = torch.zeros(model.config.vocab_size).scatter_reduce(0, batch["input_ids"][0], weights, "amax")
        lexical[UNUSED] *= 0.0
        vectors = torch.nn.functional.normalize(linear("colbert", hidden[1:]), dim=-1)
        found.append((torch.nn.functional.normalize(hidden[0], dim=-1), lexical, vectors))
    return found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(bge_m3()) as llm:
        yield llm


def outputs(llm: LLM, texts: Any, tasks: list[str] = TASKS, **options: Any) -> list[MultiTaskOutput]:
    found = llm.encode(texts, pooling_task=tasks, use_tqdm=False, truncate_prompt_tokens=-1, **options)
    return [one.outputs for one in found]


def test_three_kinds_of_vectors_equal_the_formulas(llm: LLM) -> None:
    assert llm.supported_tasks == ("embed", "token_embed", "sparse_embed")
    for output, (dense, lexical, vectors) in zip(outputs(llm, TEXTS), expected(bge_m3()), strict=True):
        assert output.embed is not None
        assert output.sparse_embed is not None
        assert output.token_embed is not None
        assert_close(output.embed.data, dense)
        assert_close(output.sparse_embed.to_dense(), lexical)
        assert_close(output.token_embed.data, vectors)


def test_heads_are_found_without_modules() -> None:
    folder = bge_m3(with_modules=False)
    with loaded(folder) as llm:
        for output, (dense, lexical, _) in zip(outputs(llm, TEXTS, TASKS[:2]), expected(folder), strict=True):
            assert output.embed is not None
            assert output.sparse_embed is not None
            assert_close(output.embed.data, dense)
            assert_close(output.sparse_embed.to_dense(), lexical)


def test_each_task_alone_gives_the_same(llm: LLM) -> None:
    together = outputs(llm, TEXTS)
    options: dict[str, Any] = {"use_tqdm": False, "truncate_prompt_tokens": -1}
    for both, text in zip(together, TEXTS, strict=True):
        assert both.embed is not None
        assert both.sparse_embed is not None
        assert both.token_embed is not None
        assert_close(llm.embed(text, **options)[0].outputs.data, both.embed.data, atol=1e-6)
        assert_close(llm.token_embed(text, **options)[0].outputs.data, both.token_embed.data, atol=1e-6)
        assert_close(llm.sparse_embed(text, **options)[0].outputs.to_dense(), both.sparse_embed.to_dense(), atol=1e-6)


def test_a_first_token_alone_has_no_vectors(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="input 1 has no token vectors"):
        llm.token_embed([[2, 3], [2]], use_tqdm=False)
    assert len(llm.embed([[2]], use_tqdm=False)) == 1


def test_a_text_is_run_once_for_all_tasks(llm: LLM) -> None:
    before = llm.engine.metrics.computed_tokens
    found = llm.encode(TEXTS, pooling_task=TASKS, use_tqdm=False, truncate_prompt_tokens=-1)
    assert llm.engine.metrics.computed_tokens - before == sum(len(one.prompt_token_ids) for one in found)


def test_tasks_come_in_any_order_and_number(llm: LLM) -> None:
    [output] = outputs(llm, "cat", ["token_embed", "embed"])
    assert output.embed is not None
    assert output.token_embed is not None
    assert output.sparse_embed is None
    [one] = outputs(llm, "cat", ["sparse_embed"])
    assert one.sparse_embed is not None
    assert one.embed is None


def test_each_task_takes_the_parameters_that_it_knows(llm: LLM) -> None:
    [output] = outputs(llm, "the cat sat on a mat", pooling_params=PoolingParams(dimensions=8, max_active_dims=2))
    assert output.embed is not None
    assert output.sparse_embed is not None
    assert len(output.embed.data) == 8
    assert len(output.sparse_embed.indices) == 2
    with pytest.raises(InvalidParameterError, match=r"step_tag_id=3 has no meaning for any of the tasks embed, sparse"):
        outputs(llm, "cat", pooling_params=PoolingParams(step_tag_id=3))


@pytest.mark.parametrize("tasks", [[], ["embed", "embed"]], ids=["none", "twice"])
def test_tasks_that_are_none_or_twice_there_are_refused(llm: LLM, tasks: list[str]) -> None:
    with pytest.raises(InvalidParameterError, match="give each once, and at least one"):
        outputs(llm, "cat", tasks)


def test_task_that_the_model_lacks_is_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedTaskError, match="'classify' is not served"):
        outputs(llm, "cat", ["embed", "classify"])


def test_any_model_does_several_tasks_at_once_also_in_chunks() -> None:
    prompts = [list(range(3, 3 + n)) for n in (5, 90, 1)]
    with loaded(tiny_llama(), max_num_batched_tokens=16) as llm:
        found = llm.encode(prompts, pooling_task=["embed", "token_embed"], use_tqdm=False)
        for output, prompt in zip(found, prompts, strict=True):
            assert output.outputs.embed is not None
            assert output.outputs.token_embed is not None
            assert_close(output.outputs.embed.data, llm.embed(prompt, use_tqdm=False)[0].outputs.data, atol=1e-6)
            tokens = llm.token_embed(prompt, use_tqdm=False)[0].outputs.data
            assert_close(output.outputs.token_embed.data, tokens, atol=1e-6)
            assert_close(output.outputs.token_embed.data[-1], output.outputs.embed.data, atol=1e-6)


def test_several_tasks_over_windows() -> None:
    config = {"enable_chunked_processing": True, "pooling_type": "MEAN"}
    with loaded(tiny_llama(), max_model_len=32, pooler_config=config) as llm:
        prompt = list(range(3, 100))
        [found] = llm.encode([prompt], pooling_task=["token_embed", "embed"], use_tqdm=False)
        assert found.num_windows > 2
        assert found.outputs.embed is not None
        assert found.outputs.token_embed is not None
        assert_close(found.outputs.embed.data, llm.embed([prompt], use_tqdm=False)[0].outputs.data, atol=1e-6)
        tokens = llm.token_embed([prompt], use_tqdm=False)[0].outputs.data
        assert_close(found.outputs.token_embed.data, tokens, atol=1e-6)


def test_not_a_number_in_one_task_is_an_error_of_the_request() -> None:
    with loaded(copy_of(bge_m3())) as llm:
        pooler = llm.engine.loaded.model.pooler.poolers["sparse_embed"]
        pooler.linear.bias.data.fill_(float("nan"))
        with pytest.raises(NonFiniteResultError):
            outputs(llm, "cat")


def fused(query: int, document: int, weights: tuple[float, ...]) -> torch.Tensor:
    """`compute_score` of FlagEmbedding: dense, sparse and multi-vector scores, averaged with weights."""
    (dense, lexical, tokens), (other, other_lexical, other_tokens) = (expected(bge_m3())[i] for i in (query, document))
    by_tokens = (tokens @ other_tokens.T).amax(dim=1).sum() / len(tokens)
    scores = torch.stack([dense @ other, lexical @ other_lexical, by_tokens])
    return (scores * torch.tensor(weights)).sum() / sum(weights)


@pytest.mark.parametrize(
    ("fuse", "weights"), [(True, (0.4, 0.2, 0.4)), ((1.0, 0.3, 1.0), (1.0, 0.3, 1.0))], ids=["default", "own"]
)
def test_fused_score_equals_the_formula(llm: LLM, fuse: Any, weights: tuple[float, ...]) -> None:
    scores = llm.score(TEXTS[4], TEXTS, fuse=fuse, use_tqdm=False)
    expected_N = torch.stack([fused(4, i, weights) for i in range(len(TEXTS))])
    assert_close(torch.tensor([one.outputs.score for one in scores]), expected_N)
    ranked = llm.rerank(TEXTS[4], TEXTS, fuse=fuse, use_tqdm=False)
    assert [one.index for one in ranked] == expected_N.argsort(descending=True).tolist()


def test_score_compares_dense_vectors_unless_it_is_fused(llm: LLM) -> None:
    [score] = llm.score(TEXTS[4], TEXTS[5], use_tqdm=False)
    (a, _, _), (b, _, _) = expected(bge_m3())[4:6]
    assert score.outputs.score == pytest.approx(float(a @ b), abs=1e-5)


@pytest.mark.parametrize("fuse", [(1.0, 1.0), (0.0, 0.0, 0.0), (1.0, -1.0, 1.0), "all"], ids=str)
def test_weights_of_a_fused_score_are_checked(llm: LLM, fuse: Any) -> None:
    with pytest.raises(InvalidParameterError, match="neither True nor three weights"):
        llm.score("cat", "mat", fuse=fuse, use_tqdm=False)


def test_fused_score_needs_three_kinds_of_vectors() -> None:
    with loaded(tiny_llama()) as llm, pytest.raises(InvalidParameterError, match="lacks sparse_embed"):
        llm.score("cat", "mat", fuse=True, use_tqdm=False)


def test_convert_embed_leaves_the_heads_out() -> None:
    with loaded(bge_m3(), convert="embed") as llm:
        assert llm.supported_tasks == ("embed", "token_embed")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, r"weight \[1, 7\] and bias \[1\]"),
        ({"weight": torch.zeros(2, HIDDEN), "bias": torch.zeros(2)}, "gives 2 numbers per token"),
        ({"weight": torch.zeros(1, HIDDEN)}, "has weight; expected weight and bias"),
        ([1], "has list; expected weight and bias"),
    ],
    ids=["size", "columns", "bias", "list"],
)
def test_head_of_another_form_is_refused(state: Any, message: str) -> None:
    folder = copy_of(bge_m3())
    torch.save(state, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointFormatError, match=message):
        LLM(folder, device="cpu")


def test_pickled_code_is_not_run() -> None:
    folder = copy_of(bge_m3())
    torch.save(print, folder / "colbert_linear.pt")
    with pytest.raises(CheckpointFormatError, match=r"colbert_linear\.pt cannot be read as plain tensors"):
        LLM(folder, device="cpu")

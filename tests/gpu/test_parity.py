"""On a GPU every family and every task give what transformers gives on a CPU: `pytest -m gpu`.

With CUDA graphs and without, whole and in chunks, in float32 to within rounding and in half precision by cosine. The
reference is always transformers in float32, on the CPU, one text at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anypool import LLM, PoolingParams
from tests.adapters.test_heads import DECODERS as HEADED_DECODERS
from tests.adapters.test_heads import ENCODERS as HEADED_ENCODERS
from tests.adapters.test_heads import logits_of, ragged, save_head
from tests.helpers import new_folder
from tests.models.parity import random_ids, reference_states, save_random
from tests.models.test_native_parity import DECODER, DECODERS, ENCODER, ENCODERS

pytestmark = pytest.mark.gpu

LENGTHS = (1, 7, 63, 130, 7, 2, 5)
FAMILIES = {**DECODERS, **ENCODERS}
# Their modules remember the lengths that they have seen, so each text has a fresh one.
REMEMBERING = ("llama-dynamic", "llama-longrope")
EAGER = pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
# float32 sums of other orders; the products of a GPU are exact float32 where TF32 is off, as torch has it.
TOLERANCE = 2e-4


@contextmanager
def on_gpu(folder: Path, **settings: Any) -> Iterator[LLM]:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU only where somebody tries these tests out
    settings = {"skip_tokenizer_init": True, **settings}
    with LLM(folder, device=device, use_tqdm_on_load=False, **settings) as llm:
        yield llm


def prompts(texts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in texts]


def mean_of(folder: Path, model: Any, texts: list[list[int]], name: str) -> torch.Tensor:
    """`[N, D]` means of transformers' states."""
    states = []
    for ids in texts:
        own = type(model).from_pretrained(folder, attn_implementation="eager") if name in REMEMBERING else model
        states.append(reference_states(own, [ids]).mean(0))
    return torch.stack(states)


def save_family(name: str) -> tuple[Path, Any]:
    model_cls, config_cls, changes = FAMILIES[name]
    sizes = DECODER if name in DECODERS else ENCODER
    model = model_cls._from_config(config_cls(**{**sizes, **changes}), attn_implementation="eager")
    folder = new_folder(f"gpu-{name}")
    save_random(model, folder)
    return folder, model


MEAN = {"pooling_type": "MEAN", "normalize": False}


def embeddings(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    return torch.stack([output.outputs.data for output in llm.embed(prompts(texts), use_tqdm=False)])


@EAGER
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers(name: str, enforce_eager: bool) -> None:
    folder, model = save_family(name)
    texts = random_ids(120, LENGTHS)
    expected = mean_of(folder, model, texts, name)
    with on_gpu(folder, dtype="float32", enforce_eager=enforce_eager, pooler_config=MEAN) as llm:
        torch.testing.assert_close(embeddings(llm, texts), expected, atol=TOLERANCE, rtol=TOLERANCE)
        # Again, and alone: a graph that is replayed, and other buckets.
        torch.testing.assert_close(embeddings(llm, texts), expected, atol=TOLERANCE, rtol=TOLERANCE)
        alone = torch.cat([embeddings(llm, [ids]) for ids in texts])
        torch.testing.assert_close(alone, expected, atol=TOLERANCE, rtol=TOLERANCE)


@EAGER
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_points_the_same_way(name: str, dtype: str, enforce_eager: bool) -> None:
    if dtype == "float16" and name.startswith("gemma"):
        pytest.skip("refused: its hidden states grow beyond float16")
    folder, model = save_family(name)
    texts = random_ids(120, LENGTHS)
    expected = mean_of(folder, model, texts, name)
    with on_gpu(folder, dtype=dtype, enforce_eager=enforce_eager, pooler_config=MEAN) as llm:
        assert F.cosine_similarity(embeddings(llm, texts), expected).min() > 0.99


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("name", [name for name in DECODERS if "bidirectional" not in name])
def test_chunks_equal_the_whole(name: str, budget: int) -> None:
    folder, model = save_family(name)
    texts = random_ids(120, LENGTHS)
    settings = {"dtype": "float32", "pooler_config": MEAN, "max_num_batched_tokens": budget}
    with on_gpu(folder, enable_chunked_prefill=True, **settings) as llm:
        torch.testing.assert_close(
            embeddings(llm, texts), mean_of(folder, model, texts, name), atol=TOLERANCE, rtol=TOLERANCE
        )


def test_prompts_that_begin_alike_share_cached_keys() -> None:
    folder, model = save_family("qwen3")
    shared = random_ids(120, (50,))[0]
    texts = [shared + own for own in random_ids(120, (1, 9, 40))]
    with on_gpu(folder, dtype="float32", pooler_config=MEAN, enable_prefix_caching=True) as llm:
        for _ in range(2):
            actual = embeddings(llm, texts)
            torch.testing.assert_close(actual, mean_of(folder, model, texts, "qwen3"), atol=TOLERANCE, rtol=TOLERANCE)
        assert llm.embed(prompts(texts), use_tqdm=False)[0].num_cached_tokens > 0


SEQUENCE_HEADS = {**HEADED_DECODERS, **HEADED_ENCODERS}


@EAGER
@pytest.mark.parametrize("name", SEQUENCE_HEADS)
def test_heads_equal_transformers(name: str, enforce_eager: bool) -> None:
    """classify, with the raw logits and their softmax."""
    stem, values = SEQUENCE_HEADS[name]
    folder = new_folder(f"gpu-head-{name}")
    model = save_head(stem, values, "SequenceClassification", folder)
    texts = ragged(pads=False)
    expected = [logits.flatten() for logits in logits_of(model, texts)]
    with on_gpu(folder, dtype="float32", enforce_eager=enforce_eager) as llm:
        for activation, finish in (("none", _same), ("softmax", _softmax)):
            outputs = llm.classify(prompts(texts), PoolingParams(activation=activation), use_tqdm=False)
            for output, logits in zip(outputs, expected, strict=True):
                actual = torch.as_tensor(output.outputs.probs)
                torch.testing.assert_close(actual, finish(logits), atol=TOLERANCE, rtol=TOLERANCE)


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "CLS": lambda rows: rows[0],
    "LAST": lambda rows: rows[-1],
    "MEAN": lambda rows: rows.mean(0),
    "MAX": lambda rows: rows.amax(0),
    "MEAN_SQRT_LEN": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "WEIGHTED_MEAN": lambda rows: (
        (rows * torch.arange(1, len(rows) + 1)[:, None]).sum(0) / (len(rows) * (len(rows) + 1) / 2)
    ),
}


@EAGER
@pytest.mark.parametrize("kind", POOLED)
def test_embed_pools_cuts_and_normalises(kind: str, enforce_eager: bool) -> None:
    folder, model = save_family("llama")
    texts = random_ids(120, LENGTHS)
    rows = torch.stack([POOLED[kind](reference_states(model, [ids])) for ids in texts])
    settings = {"dtype": "float32", "enforce_eager": enforce_eager, "pooler_config": {"pooling_type": kind}}
    with on_gpu(folder, **settings) as llm:
        for params, expected in (
            (PoolingParams(), F.normalize(rows, dim=-1)),
            (PoolingParams(dimensions=8), F.normalize(rows[:, :8], dim=-1)),
            (PoolingParams(normalize=False), rows),
        ):
            outputs = llm.embed(prompts(texts), params, use_tqdm=False)
            actual = torch.stack([output.outputs.data for output in outputs])
            torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@EAGER
def test_tasks_with_a_row_per_token(enforce_eager: bool) -> None:
    """token_embed, token_classify and reward, all in one engine."""
    stem, values = HEADED_DECODERS["llama"]
    folder = new_folder("gpu-tokens")
    model = save_head(stem, values, "TokenClassification", folder)
    texts = ragged(pads=False)
    logits = [rows.flatten(0, -2) for rows in logits_of(model, texts)]
    with on_gpu(folder, dtype="float32", enforce_eager=enforce_eager) as llm:
        vectors = llm.token_embed(prompts(texts), use_tqdm=False)
        labels = llm.token_classify(prompts(texts), PoolingParams(activation="none"), use_tqdm=False)
        rewards = llm.reward(prompts(texts), PoolingParams(activation="none"), use_tqdm=False)
        for ids, vector, label, reward, expected in zip(texts, vectors, labels, rewards, logits, strict=True):
            states = F.normalize(reference_states(model, [ids]), dim=-1)
            torch.testing.assert_close(vector.outputs.data, states, atol=TOLERANCE, rtol=TOLERANCE)
            for output in (label, reward):
                torch.testing.assert_close(
                    torch.as_tensor(output.outputs.data), expected, atol=TOLERANCE, rtol=TOLERANCE
                )


def test_a_graph_is_captured_and_used() -> None:
    folder, _ = save_family("bert")
    with on_gpu(folder, pooler_config=MEAN) as llm:
        embeddings(llm, random_ids(120, (9,)))
        graphs = llm.engine._executor.runner.graphs
        assert graphs is not None
        assert len(graphs) == 1

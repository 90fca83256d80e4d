"""Whole models whose layers, attention and poolers run as kernels equal transformers; on a CPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.parity import chunked_states, load, packed_states, random_ids, reference_states, save_random
from tests.models.test_native_parity import DECODER, DECODERS, ENCODER, ENCODERS

TEXTS = (1, 7, 40)
NAMES = ("llama", "qwen3", "gemma2", "gemma3", "mistral-sliding-bidirectional", "xlm-roberta", "modernbert")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    monkeypatch.setenv("ANYPOOL_CPU_LINEAR", "plain")  # as on a GPU, so that gates are kernels


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_kernels_equals_transformers(name: str, tmp_path: Path) -> None:
    model_cls, config_cls, changes = {**DECODERS, **ENCODERS}[name]
    sizes = DECODER if name in DECODERS else ENCODER
    model = model_cls._from_config(config_cls(**{**sizes, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120, TEXTS)
    torch.testing.assert_close(packed_states(tmp_path, texts), reference_states(model, texts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_chunks_over_cached_keys_equal_transformers(name: str, tmp_path: Path) -> None:
    model_cls, config_cls, changes = DECODERS[name]
    model = model_cls._from_config(config_cls(**{**DECODER, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120, TEXTS)
    actual = chunked_states(load(tmp_path), texts, block_size=4, longest=17)
    torch.testing.assert_close(actual, reference_states(model, texts), atol=1e-5, rtol=0)


def test_padding_tokens_inside_a_text_equal_transformers(tmp_path: Path) -> None:
    model_cls, config_cls, changes = ENCODERS["roberta"]
    model = model_cls._from_config(config_cls(**{**ENCODER, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = [[5, 1, 6, 0, 7], [1, 1, 9], [8, 9, 1], [5, 6]]
    torch.testing.assert_close(packed_states(tmp_path, texts), reference_states(model, texts), atol=1e-5, rtol=0)

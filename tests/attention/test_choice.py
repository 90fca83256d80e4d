"""Which code computes a layer's attention, and that our kernel gives a layer what the CPU path gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anypool.model_executor.attention import Attention, AttentionMetadata, PrefixKeys
from anypool.model_executor.attention.choice import Layer, choose_attention
from anypool.model_executor.kv_store import KVStore

CPU = torch.device("cpu")
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "key_size": 128, "value_size": 128}


@pytest.mark.parametrize(
    ("layer", "with_both", "without_varlen", "without_either"),
    [
        (BF16, "varlen", "triton", "grouped"),
        (BF16 | {"dtype": torch.float16}, "varlen", "triton", "grouped"),
        (BF16 | {"dtype": torch.float32}, "triton", "triton", "grouped"),
        (BF16 | {"has_softcap": True}, "triton", "triton", "grouped"),
        (BF16 | {"has_sinks": True}, "triton", "triton", "grouped"),
        (BF16 | {"has_prefix": True}, "triton", "triton", "grouped"),
        (BF16 | {"has_bias": True}, "grouped", "grouped", "grouped"),
        (BF16 | {"key_size": 256, "value_size": 256}, "varlen", "triton", "grouped"),
        (BF16 | {"key_size": 512, "value_size": 512}, "grouped", "grouped", "grouped"),
        (BF16 | {"key_size": 20, "value_size": 20}, "triton", "triton", "grouped"),
        (BF16 | {"key_size": 192}, "triton", "triton", "grouped"),
    ],
)
def test_the_choice(layer: dict[str, Any], with_both: str, without_varlen: str, without_either: str) -> None:
    for expected, has_varlen, has_triton in (
        (with_both, True, True),
        (without_varlen, False, True),
        (without_either, False, False),
    ):
        assert choose_attention(Layer(**layer), has_varlen=has_varlen, has_triton=has_triton) == expected


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("window", [(-1, 0), (9, 0), (-1, -1)])
def test_a_layer_gives_the_same_through_our_kernel(
    window: tuple[int, int], softcap: float | None, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    lengths = (7, 1, 40)
    q, k, v = torch.randn(sum(lengths), 8, 16).split([4, 2, 2], dim=1)
    layer, attn = Attention(scale=0.25, window=window, softcap=softcap), AttentionMetadata.from_lengths(lengths, CPU)
    expected = layer(q, k, v, attn)
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    torch.testing.assert_close(layer(q, k, v, attn), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("window", [(-1, 0), (20, 0)])
def test_chunks_over_cached_keys_give_the_whole_prompt(
    window: tuple[int, int], monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    q, k, v = torch.randn(50, 6, 16).split([2, 2, 2], dim=1)
    layer = Attention(scale=0.25, window=window)
    expected = layer(q, k, v, AttentionMetadata.from_lengths((50,), CPU))
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    store = KVStore(5, 16, CPU)
    for start, stop in ((0, 20), (20, 39), (39, 50)):
        prefix = PrefixKeys.plan(
            store, starts=[start], lengths=[stop - start], block_tables=[[3, 0, 4, 1]], stored=[stop]
        )
        prefix.begin()
        attn = AttentionMetadata.from_lengths((stop - start,), CPU, prompt_lengths=(stop,), prefix=prefix)
        actual = layer(q[start:stop], k[start:stop], v[start:stop], attn)
        prefix.end()
        torch.testing.assert_close(actual, expected[start:stop], atol=5e-6, rtol=5e-6)

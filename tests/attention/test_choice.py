"""Which code computes a layer's attention, and that our kernel gives a layer what the CPU path gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from anypool.kernels.varlen_attention import reference
from anypool.model_executor.attention import Attention, AttentionMetadata, PrefixKeys, choice
from anypool.model_executor.attention.choice import VARLEN_OPTIONS, Layer, choose_attention
from anypool.model_executor.attention.packed import torch_attention
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


def new(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False, num_splits=None):  # type: ignore[no-untyped-def]
    """As torch 2.11 has it."""


def old(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, return_aux=None, scale=None):  # type: ignore[no-untyped-def]
    """As torch 2.10 has it."""


@pytest.mark.parametrize(
    ("attend", "capability", "hip", "there"),
    [
        (new, (8, 0), None, True),
        (new, (9, 0), None, True),
        (new, (7, 5), None, False),
        (new, (9, 4), "6.4", False),
        (old, (9, 0), None, False),
    ],
)
def test_torchs_packed_attention_is_taken_where_it_has_what_we_ask_of_it(
    attend: Any, capability: tuple[int, int], hip: str | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert choice.has_varlen.__wrapped__(torch.device("cuda")) is there


def test_torchs_packed_attention_is_called_as_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the operation itself, which a CPU does not have: in its place is the plain softmax."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not inspect.signature(varlen.varlen_attn).parameters.keys() >= VARLEN_OPTIONS:
        pytest.skip("this torch has it without windows")
    calls: list[Any] = []

    def operation(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        calls.append(rest)
        left, right = rest[6]
        out = reference.varlen_attention(q, k, v, rest[0], scale=rest[5], window=(left, right))
        return out, None, None

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", operation)
    lengths = (7, 1, 40)
    q, k, v = torch.randn(sum(lengths), 8, 16).split([4, 2, 2], dim=1)
    attn = AttentionMetadata.from_lengths(lengths, CPU)
    for window in ((-1, 0), (9, 0), (-1, -1), (5, 5)):
        layer = Attention(scale=0.3, window=window)
        actual = torch_attention(q, k, v, attn, scale=0.3, window=window)
        torch.testing.assert_close(actual, layer(q, k, v, attn), atol=5e-6, rtol=5e-6)
    bounds_q, bounds_k, longest_q, longest_k, is_causal, _, _, gqa, used, table, splits = calls[0]
    assert (bounds_q is bounds_k, longest_q, longest_k, is_causal) == (True, 40, 40, True)
    assert (gqa, used, table, splits) == (True, None, None, 1)

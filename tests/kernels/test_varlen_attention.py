"""The attention kernel gives what plain torch gives, which is what torch's own attention gives sequence by sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anypool.kernels.varlen_attention import PagedKeys, reference, varlen_attention
from tests.kernels.conftest import ALL_NAN, DTYPES, assert_near, bounds, random

RAGGED = (7, 0, 63, 1, 130)
WINDOWS = {
    "bidirectional": (-1, -1),
    "causal": (-1, 0),
    "causal, 50 tokens with its own": (49, 0),
    "both sides": (20, 20),
}


def heads(
    lengths: tuple[int, ...], counts: tuple[int, int], size: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as a fused projection gives them."""
    qkv = random(sum(lengths), counts[0] + 2 * counts[1], size, device=device, dtype=dtype)
    return qkv.split([counts[0], counts[1], counts[1]], dim=1)


def compare(lengths: tuple[int, ...], qkv: tuple[torch.Tensor, ...], **options: Any) -> None:
    cu_seqlens = bounds(lengths, qkv[0].device)
    actual = varlen_attention(*qkv, cu_seqlens, max(lengths), **options)
    assert_near(actual, reference.varlen_attention(*qkv, cu_seqlens, **options), within=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_soft_caps(
    softcap: float | None, window: tuple[int, int], dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    qkv = heads(RAGGED, (4, 2), 32, device, dtype)
    compare(RAGGED, qkv, scale=32**-0.5, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 32, 80, 128, 256])
def test_head_sizes(size: int, dtype: torch.dtype, kernels: None, device: torch.device) -> None:
    qkv = heads((33, 2), (2, 1), size, device, dtype)
    compare((33, 2), qkv, scale=size**-0.5, window=(-1, 0))


@pytest.mark.parametrize("window", [(-1, -1), (100, 0)])
def test_a_long_sequence(window: tuple[int, int], kernels: None, device: torch.device) -> None:
    compare((1000,), heads((1000,), (2, 1), 16, device, torch.bfloat16), scale=0.25, window=window)


def test_values_may_have_another_size_than_keys(kernels: None, device: torch.device) -> None:
    q, k, _ = heads(RAGGED, (2, 2), 24, device, torch.float32)
    compare(RAGGED, (q, k, random(sum(RAGGED), 2, 40, device=device)), scale=0.2)


def test_sinks_take_part_without_a_value(kernels: None, device: torch.device) -> None:
    sinks_H = random(4, device=device, seed=3).contiguous()
    qkv = heads(RAGGED, (4, 2), 32, device, torch.float32)
    compare(RAGGED, qkv, scale=0.2, window=(-1, 0), sinks_H=sinks_H)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(-1, 0), (20, 0)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cached_keys_stand_before_the_queries(
    softcap: float | None, window: tuple[int, int], dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    lengths, before, size = (7, 40, 1, 5), (33, 0, 130, 16), 16
    slots = 16 * 16
    prefix = PagedKeys(
        k_SGK=random(slots, 2, 32, device=device, dtype=dtype, seed=4),
        v_SGV=random(slots, 2, 32, device=device, dtype=dtype, seed=5),
        tables_NB=torch.randperm(16, generator=torch.Generator().manual_seed(6))[:9].int().repeat(4, 1).to(device),
        lengths_N=torch.tensor(before, dtype=torch.int32, device=device),
        block_size=size,
    )
    qkv = heads(lengths, (4, 2), 32, device, dtype)
    compare(lengths, qkv, scale=0.2, window=window, softcap=softcap, prefix=prefix)


def test_a_prefix_gives_what_the_whole_prompt_gives(kernels: None, device: torch.device) -> None:
    """Not against our reference: torch's own attention over all 50 tokens."""
    q, k, v = heads((50,), (2, 2), 16, device, torch.float32)
    whole = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3)
    blocks = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    cache = [torch.full((48, 2, 16), float("nan"), device=device) for _ in range(2)]
    for position in range(33):
        slot = int(blocks[0, position // 16]) * 16 + position % 16
        cache[0][slot], cache[1][slot] = k[position], v[position]
    prefix = PagedKeys(cache[0], cache[1], blocks, torch.tensor([33], dtype=torch.int32, device=device), 16)
    actual = varlen_attention(
        q[33:], k[33:], v[33:], bounds((17,), device), 17, scale=0.3, window=(-1, 0), prefix=prefix
    )
    assert_near(actual, whole.transpose(0, 1)[33:])


@ALL_NAN
def test_neighbours_that_are_nan_do_not_get_through(kernels: None, device: torch.device) -> None:
    qkv = [x.clone() for x in heads((20, 30, 20), (2, 1), 16, device, torch.float32)]
    cu_seqlens = bounds((20, 30, 20), device)
    clean = varlen_attention(*qkv, cu_seqlens, 30, scale=0.25)[20:50]
    for x in qkv:
        x[:20], x[50:] = float("nan"), float("nan")
    attended = varlen_attention(*qkv, cu_seqlens, 30, scale=0.25)
    assert torch.equal(attended[20:50], clean)
    assert attended[:20].isnan().all()

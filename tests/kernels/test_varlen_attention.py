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


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_tokens_that_are_not_attended_to(window: tuple[int, int], kernels: None, device: torch.device) -> None:
    q, k, v = heads(RAGGED, (4, 2), 32, device, torch.float32)
    key_lengths_N = torch.tensor([3, 0, 40, 1, 130], dtype=torch.int32, device=device)
    k[47:70], v[47:70] = 99.0, 99.0  # of the third sequence, behind its keys
    compare(RAGGED, (q, k, v), scale=0.2, window=window, key_lengths_N=key_lengths_N)


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


def test_keys_and_values_lie_each_in_their_own_way(kernels: None, device: torch.device) -> None:
    q, k, v = heads(RAGGED, (4, 2), 32, device, torch.float32)
    prefix = PagedKeys(
        k_SGK=random(32, 2, 32, device=device, seed=4).transpose(0, 1).contiguous().transpose(0, 1),
        v_SGV=random(32, 3, 32, device=device, seed=5)[:, 1:],
        tables_NB=torch.tensor([[1], [0], [0], [1], [0]], dtype=torch.int32, device=device),
        lengths_N=torch.tensor([9, 1, 16, 0, 3], dtype=torch.int32, device=device),
        block_size=16,
    )
    apart = q, k.transpose(0, 1).contiguous().transpose(0, 1), v
    compare(RAGGED, apart, scale=0.2, window=(-1, 0), prefix=prefix)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("factor", [1e-6, 1e3, 1e8])
def test_scores_of_all_sizes(factor: float, softcap: float | None, kernels: None, device: torch.device) -> None:
    """The largest are so far apart that a softmax without its maximum taken off is infinite."""
    q, k, v = heads(RAGGED, (2, 1), 16, device, torch.float32)
    cu_seqlens = bounds(RAGGED, device)
    for window in ((-1, 0), (2, 0), (0, 0)):
        options: dict[str, Any] = {"scale": 0.25, "window": window, "softcap": softcap}
        actual = varlen_attention(q * factor, k, v, cu_seqlens, max(RAGGED), **options)
        expected = reference.varlen_attention(q * factor, k, v, cu_seqlens, **options)
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, atol=1e-2 if factor > 1e3 else 2e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@ALL_NAN
def test_a_score_that_is_infinite_is_seen(kernels: None, device: torch.device) -> None:
    q, k, v = (x.clone() for x in heads((20, 9), (2, 1), 16, device, torch.float32))
    k[3] = float("inf")
    attended = varlen_attention(q.abs(), k, v, bounds((20, 9), device), 20, scale=0.25)
    assert attended[:20].isnan().all()
    assert attended[20:].isfinite().all()


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
    slots, generator = 16 * 16, torch.Generator().manual_seed(6)
    prefix = PagedKeys(
        k_SGK=random(slots, 2, 32, device=device, dtype=dtype, seed=4),
        v_SGV=random(slots, 2, 32, device=device, dtype=dtype, seed=5),
        tables_NB=torch.stack([torch.randperm(16, generator=generator)[:9] for _ in before]).int().to(device),
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

"""Rows that lie more than 2**31 elements behind the first are found: offsets are 64-bit where they have to be.

The memory between the rows is never touched, so it costs addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anypool.kernels import (
    gated,
    maxsim,
    rms_norm,
    rotary,
    score_head,
    segment_pool,
    segmented_lora,
    token_pool,
    varlen_attention,
)
from anypool.kernels.varlen_attention import PagedKeys
from tests.kernels.conftest import assert_near, bounds

ROWS, SIZE = 6, 48
# A stride that is a 32-bit number itself, as those of real tensors are.
STRIDE = 1 << 29


@pytest.fixture(scope="module")
def far() -> torch.Tensor:
    """`[6, 48]`, the last row 2.7 billion elements behind the first."""
    if torch.cuda.is_available():
        device, room = torch.device("cuda"), torch.cuda.mem_get_info()[0]
        if room < 12 << 30:
            pytest.skip("needs 6 GiB of a GPU's memory")
    else:
        device = torch.device("cpu")
    try:
        storage = torch.empty((ROWS - 1) * STRIDE + SIZE, dtype=torch.float16, device=device)
    except RuntimeError as error:  # where memory may not be promised beyond what there is
        pytest.skip(str(error))
    rows = storage.as_strided((ROWS, SIZE), (STRIDE, 1))
    return rows.copy_(torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0)))


def attend(rows: torch.Tensor) -> torch.Tensor:
    q, k, v = rows.unflatten(1, (3, 16)).split(1, dim=1)
    return varlen_attention.varlen_attention(q, k, v, bounds((2, 4), rows.device), 4, scale=0.3)


def attend_to_slots(rows: torch.Tensor) -> torch.Tensor:
    _, k, v = rows.unflatten(1, (3, 16)).split(1, dim=1)
    table = torch.tensor([[2, 1]], dtype=torch.int32, device=rows.device)
    prefix = PagedKeys(k, v, table, torch.tensor([4], dtype=torch.int32, device=rows.device), 2)
    own = torch.ones(3, 1, 16, dtype=rows.dtype, device=rows.device)
    return varlen_attention.varlen_attention(
        own, own, own, bounds((3,), rows.device), 3, scale=0.3, window=(-1, 0), prefix=prefix
    )


def angles(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(ROWS, 1, 8, dtype=rows.dtype, device=rows.device)


def late(rows: torch.Tensor) -> torch.Tensor:
    cu, pairs = bounds((3, 3), rows.device), torch.tensor([[0, 1], [1, 0]], device=rows.device)
    return maxsim.maxsim_pairs(rows, cu, rows, cu, pairs)


def adapted(rows: torch.Tensor) -> torch.Tensor:
    lora = segmented_lora.LoRAStack(2, 4, SIZE, 8, dtype=rows.dtype, device=rows.device)
    lora.put(1, rows[:4], torch.ones(8, 4, device=rows.device), 0.1)
    belongs = segmented_lora.LoRARows.pack((-1, 1), (2, 4), device=rows.device)
    return segmented_lora.segmented_lora(torch.zeros_like(rows[:, :8]), rows, lora, belongs)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: segment_pool.segment_pool(rows, bounds((1, 5), rows.device), "MEAN"),
    "last": lambda rows: segment_pool.segment_pool(rows, bounds((1, 5), rows.device), "LAST", normalize=True),
    "tokens": lambda rows: token_pool.token_pool(rows, finish="softmax"),
    "gathered tokens": lambda rows: token_pool.token_pool(rows, index_S=torch.tensor([5, 0]).to(rows.device)),
    "scores": lambda rows: score_head.score_head(rows, torch.ones(2, SIZE, device=rows.device)),
    "gate": lambda rows: gated.gated(rows, "silu"),
    "norm": lambda rows: rms_norm.rms_norm(rows, torch.ones_like(rows[0]), eps=1e-6, residual=rows)[0],
    "turned": lambda rows: rotary.apply_rotary(rows.unflatten(1, (3, 16)), angles(rows), angles(rows)),
    "maxsim": late,
    "adapters": adapted,
    "attention": attend,
    "attention to slots": attend_to_slots,
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_found_however_far_apart_they_lie(
    name: str, far: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("ANYPOOL_KERNELS", "torch")
    expected = CALLS[name](far.contiguous())
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    actual = CALLS[name](far)
    assert_near(actual, expected, within=1e-5)

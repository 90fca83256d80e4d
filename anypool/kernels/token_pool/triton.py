"""`token_pool` for GPUs: each kept row is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows

# Elements of a tile: as many rows as fit beside each other.
_TILE = 4096


@triton.jit
def token_pool_kernel(
    rows_ptr,
    index_ptr,
    out_ptr,
    count,
    rows_stride,
    out_stride,
    dimensions,
    FINISH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    mask = (places < count)[:, None] & (columns < dimensions)[None, :]
    sources = places
    if index_ptr is not None:
        sources = tl.load(index_ptr + places, mask=places < count, other=0).to(tl.int64)
    rows = tl.load(rows_ptr + sources[:, None] * rows_stride + columns[None, :], mask=mask, other=0.0)
    rows = rows.to(tl.float32)
    if FINISH == "normalize":
        rows = rows / tl.maximum(tl.sqrt(tl.sum(rows * rows, axis=1)), 1e-12)[:, None]
    elif FINISH == "softmax":
        rows = tl.where((columns < dimensions)[None, :], rows, float("-inf"))
        rows = tl.exp(rows - tl.max(rows, axis=1)[:, None])
        rows = rows / tl.sum(rows, axis=1)[:, None]
    tl.store(out_ptr + places[:, None] * out_stride + columns[None, :], rows, mask=mask)


def token_pool(
    rows_TD: torch.Tensor, index_S: torch.Tensor | None, *, dimensions: int, finish: str, dtype: torch.dtype
) -> torch.Tensor:
    """`[S or T, dimensions]`; arguments as for the public function."""
    rows_TD = with_plain_rows(rows_TD)
    count = len(rows_TD) if index_S is None else len(index_S)
    out_SD = torch.empty(count, dimensions, dtype=dtype, device=rows_TD.device)
    block_d = next_power_of_two(dimensions)
    block_s = max(1, min(64, _TILE // block_d))
    if count > 0:
        token_pool_kernel[(triton.cdiv(count, block_s),)](
            rows_TD,
            None if index_S is None else index_S.contiguous(),
            out_SD,
            count,
            rows_TD.stride(0),
            out_SD.stride(0),
            dimensions,
            FINISH=finish,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=8 if block_d >= 4096 else 4,
        )
    return out_SD

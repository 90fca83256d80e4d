"""`segment_pool` for GPUs. The hidden states are read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows

# Elements of a tile: rows by columns, in registers.
_TILE = 8192
# Below so many sequences, one program each would leave most of a GPU idle.
_PROGRAMS = 256
_COLUMNS = 128


@triton.jit
def segment_pool_kernel(
    rows_ptr,
    cu_seqlens_ptr,
    skips_ptr,
    out_ptr,
    rows_stride,
    out_stride,
    dimensions,
    METHOD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < dimensions
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    first = begin
    if skips_ptr is not None:
        first += tl.load(skips_ptr + sequence)
    count = tl.maximum(end - first, 0).to(tl.float32)

    if METHOD == "CLS" or METHOD == "LAST":
        row = first if METHOD == "CLS" else end - 1
        there = columns < tl.where(first < end, dimensions, 0)
        pooled = tl.load(rows_ptr + row * rows_stride + columns, mask=there, other=0.0).to(tl.float32)
    else:
        nothing = float("-inf") if METHOD == "MAX" else 0.0
        pooled = tl.full([BLOCK_D], nothing, tl.float32)
        nans = tl.zeros([BLOCK_D], tl.int32)
        for start in range(first, end, BLOCK_T):
            places = start + tl.arange(0, BLOCK_T).to(tl.int64)
            mask = (places < end)[:, None] & inside[None, :]
            tile = tl.load(rows_ptr + places[:, None] * rows_stride + columns[None, :], mask=mask, other=nothing)
            tile = tile.to(tl.float32)
            if METHOD == "MAX":
                pooled = tl.maximum(pooled, tl.max(tile, axis=0))
                nans += tl.sum((tile != tile).to(tl.int32), axis=0)  # a maximum passes over NaN, which must be seen
            elif METHOD == "WEIGHTED_MEAN":
                pooled += tl.sum(tile * (places - begin + 1).to(tl.float32)[:, None], axis=0)
            else:
                pooled += tl.sum(tile, axis=0)
        if METHOD == "MAX":
            pooled = tl.where(nans > 0, float("nan"), tl.where(count > 0, pooled, 0.0))
        else:
            divisor = count
            if METHOD == "WEIGHTED_MEAN":
                divisor = count * ((first - begin + 1 + end - begin).to(tl.float32) * 0.5)
            elif METHOD == "MEAN_SQRT_LEN":
                divisor = tl.sqrt(count)
            pooled = tl.where(count > 0, pooled / tl.maximum(divisor, 1.0), 0.0)

    if NORMALIZE:
        pooled = tl.where(inside, pooled, 0.0)
        pooled = pooled / tl.maximum(tl.sqrt(tl.sum(pooled * pooled, axis=0)), 1e-12)
    tl.store(out_ptr + sequence.to(tl.int64) * out_stride + columns, pooled, mask=inside)


def segment_pool(
    rows_TD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    method: str,
    *,
    skips_N: torch.Tensor | None,
    dimensions: int,
    normalize: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[N, dimensions]`; arguments as for the public function.

    A norm needs the whole row in one program. Where sequences are few and long, the sums are made by more programs,
    each of some columns, and the norm is a second launch over the pooled rows, which are a small part of what is read.
    """
    count = len(cu_seqlens) - 1
    reduces = method not in ("CLS", "LAST")
    if normalize and reduces and count < _PROGRAMS:
        pooled_ND = segment_pool(
            rows_TD,
            cu_seqlens,
            method,
            skips_N=skips_N,
            dimensions=dimensions,
            normalize=False,
            dtype=torch.float32,
        )
        each_N1 = torch.arange(count + 1, dtype=torch.int32, device=rows_TD.device)
        rows_TD, cu_seqlens, skips_N, method, reduces = pooled_ND, each_N1, None, "LAST", False
    rows_TD = with_plain_rows(rows_TD)
    out_ND = torch.empty(count, dimensions, dtype=dtype, device=rows_TD.device)
    block_d = next_power_of_two(dimensions) if normalize or not reduces else _COLUMNS
    block_t = max(1, min(64, _TILE // block_d)) if reduces else 1
    if count > 0:
        segment_pool_kernel[(count, triton.cdiv(dimensions, block_d))](
            rows_TD,
            cu_seqlens,
            skips_N,
            out_ND,
            rows_TD.stride(0),
            out_ND.stride(0),
            dimensions,
            METHOD=method,
            NORMALIZE=normalize,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=8 if block_t * block_d >= 4096 else 4,
        )
    return out_ND

"""`rms_norm` for GPUs: one pass in place of one for the sum and four for the norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two

# Elements of a tile: heads are short rows, of which a program takes several.
_TILE = 2048


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    size,
    eps,
    UNIT_OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_K)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    x_row = (row // inner) * x_outer_stride + (row % inner) * x_inner_stride
    x = tl.load(x_ptr + x_row[:, None] + column[None, :], mask=mask, other=0.0)
    out = row[:, None] * size + column[None, :]
    if residual_ptr is not None:
        residual_row = (row // inner) * residual_outer_stride + (row % inner) * residual_inner_stride
        residual = tl.load(residual_ptr + residual_row[:, None] + column[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)  # rounded, as a sum that is stored is
        tl.store(sum_ptr + out, x, mask=mask)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    tl.store(out_ptr + out, x * inverse[:, None] * weight[None, :], mask=mask)


def rms_norm(
    x: torch.Tensor, weight_K: torch.Tensor, *, eps: float, unit_offset: bool, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows and the sum; arguments as for the public function.

    Heads of a fused projection are read where they lie.
    """
    size = x.shape[-1]
    x_MHK = _as_matrix_of_rows(x)
    added_MHK = None if residual is None else _as_matrix_of_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    rows = x_MHK.shape[0] * x_MHK.shape[1]
    block_k = next_power_of_two(size)
    block_r = max(1, min(16, _TILE // block_k))
    if rows > 0:
        rms_norm_kernel[(triton.cdiv(rows, block_r),)](
            x_MHK,
            added_MHK,
            weight_K,
            out,
            total,
            rows,
            x_MHK.shape[1],
            x_MHK.stride(0),
            x_MHK.stride(1),
            0 if added_MHK is None else added_MHK.stride(0),
            0 if added_MHK is None else added_MHK.stride(1),
            size,
            float(eps),
            UNIT_OFFSET=unit_offset,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=8 if block_k >= 4096 else 4,
        )
    return out, total


def _as_matrix_of_rows(x: torch.Tensor) -> torch.Tensor:
    """`[M, H, K]`, a view where there is one: rows lie evenly in two dimensions at most."""
    x = x if x.dim() <= 3 and x.stride(-1) == 1 else x.contiguous()
    if x.dim() <= 2:
        return x.reshape(1, -1, x.shape[-1]) if x.dim() < 2 else x.unsqueeze(1)
    return x if x.dim() == 3 else x.view(-1, 1, x.shape[-1])

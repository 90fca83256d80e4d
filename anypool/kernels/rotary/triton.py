"""`apply_rotary` for GPUs: one pass in place of three or four."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    cos_stride,
    sin_stride,
    heads,
    size,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_K)
    mask = (head < heads)[:, None] & (column < size)[None, :]
    turns = column < 2 * HALF
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    cos = tl.load(cos_ptr + token * cos_stride + column, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride + column, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(column < HALF, -sin, sin)
    rows = x_ptr + token * x_token_stride + head[:, None] * x_head_stride
    x = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows + partner[None, :], mask=mask & turns[None, :], other=0.0).to(tl.float32)
    out = token * heads * size + head[:, None] * size + column[None, :]
    tl.store(out_ptr + out, x * cos[None, :] + other * sin[None, :], mask=mask)


def apply_rotary(x_THK: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Arguments and result as for the public function."""
    x_THK, cos_T1R, sin_T1R = map(with_plain_rows, (x_THK, cos_T1R, sin_T1R))
    tokens, heads, size = x_THK.shape
    out_THK = torch.empty(x_THK.shape, dtype=x_THK.dtype, device=x_THK.device)
    block_k = next_power_of_two(size)
    block_h = min(next_power_of_two(heads), max(1, 4096 // block_k))
    if out_THK.numel() > 0:
        rotary_kernel[(tokens, triton.cdiv(heads, block_h))](
            x_THK,
            cos_T1R,
            sin_T1R,
            out_THK,
            x_THK.stride(0),
            x_THK.stride(1),
            cos_T1R.stride(0),
            sin_T1R.stride(0),
            heads,
            size,
            HALF=cos_T1R.shape[-1] // 2,
            BLOCK_H=block_h,
            BLOCK_K=block_k,
            num_warps=4,
        )
    return out_THK

"""`segmented_lora` for GPUs: one kernel, launched for the product with A and again for that with B.

A tile of rows that belong to several adapters is passed over once for each of them. So all that a launch needs to know
is each row's slot, which lies on the device: a captured CUDA graph serves whichever adapters come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows
from anypool.kernels.segmented_lora.stack import LoRAStack

# Columns of x that are worth a program, and the most sums that are added later: with one program for all columns a
# short batch has too few. How many there are may not depend on the batch, or a row's last digits would.
_SPAN = 1024
_PARTS = 4


@triton.jit
def segmented_product_kernel(
    x_ptr,
    weight_ptr,
    slots_ptr,
    ranks_ptr,
    scalings_ptr,
    out_ptr,
    rows,
    size,
    outputs,
    slot_count,
    span,
    x_part_stride,
    x_stride,
    slot_stride,
    weight_stride,
    out_part_stride,
    out_stride,
    TO_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x W^T of each row with its slot's weight: sums over a span of x's columns, or what is scaled and added to out."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    slots = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    begin = tl.program_id(2) * span
    for slot in range(tl.min(tl.where(slots < 0, slot_count, slots), axis=0), tl.max(slots, axis=0) + 1):
        own = slots == slot
        rank = 0
        if tl.max(own.to(tl.int32), axis=0) > 0:
            rank = tl.load(ranks_ptr + slot)
        if rank > 0:
            if TO_RANK:
                end, there = tl.minimum(begin + span, size), output < rank
            else:
                end, there = rank, output < outputs
            weights_ptr = weight_ptr + tl.cast(slot, tl.int64) * slot_stride
            total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
            for start in range(begin, end, BLOCK_D):
                column = start + tl.arange(0, BLOCK_D)
                weight = tl.load(
                    weights_ptr + output[:, None] * weight_stride + column[None, :],
                    mask=there[:, None] & (column < end)[None, :],
                    other=0.0,
                )
                dtype = weight.dtype
                from_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
                mask = own[:, None] & (column < end)[None, :]
                x = tl.load(from_ptr, mask=mask, other=0.0)
                for part in tl.static_range(1, PARTS):
                    x += tl.load(from_ptr + part * x_part_stride, mask=mask, other=0.0)
                x = x.to(dtype)
                if UPCAST:
                    x, weight = x.to(tl.float32), weight.to(tl.float32)
                total += tl.dot(x, tl.trans(weight), input_precision="ieee")
            to_ptr = out_ptr + tl.program_id(2) * out_part_stride + row[:, None] * out_stride + output[None, :]
            mask = own[:, None] & there[None, :]
            if not TO_RANK:
                total *= tl.load(scalings_ptr + slot)
                total += tl.load(to_ptr, mask=mask, other=0.0).to(tl.float32)
            tl.store(to_ptr, total, mask=mask)


def segmented_lora(y_TO: torch.Tensor, x_TD: torch.Tensor, lora: LoRAStack, slots_T: torch.Tensor) -> None:
    """Arguments as for the public function; `y_TO` is of exactly O columns, `slots_T` `[T]` int32."""
    _, rank, size = lora.a_SRD.shape
    parts = min(_PARTS, triton.cdiv(size, _SPAN))
    # Of rows that have no adapter, nothing is written nor read.
    inner_PTR = torch.empty(parts, len(x_TD), rank, dtype=torch.float32, device=x_TD.device)
    block_r = max(16, min(64, next_power_of_two(rank)))
    wide = x_TD.element_size() > 2
    to_rank = (32, block_r, 64) if wide else (32, block_r, 128)
    from_rank = (32, 64, block_r) if wide else (64, 128, block_r)
    _launch(with_plain_rows(x_TD)[None], lora.a_SRD, inner_PTR, lora, slots_T, to_rank=True, tile=to_rank)
    _launch(inner_PTR, lora.b_SOR, y_TO[None], lora, slots_T, to_rank=False, tile=from_rank)


def _launch(
    x_PTD: torch.Tensor,
    weight_SOD: torch.Tensor,
    out_PTO: torch.Tensor,
    lora: LoRAStack,
    slots_T: torch.Tensor,
    *,
    to_rank: bool,
    tile: tuple[int, int, int],
) -> None:
    """x, summed over its parts, times the weights: each span of columns into its part of out, or added to out."""
    block_t, block_o, block_d = tile
    slots, outputs, size = weight_SOD.shape
    rows = len(slots_T)
    segmented_product_kernel[(triton.cdiv(rows, block_t), triton.cdiv(outputs, block_o), len(out_PTO))](
        x_PTD,
        weight_SOD,
        slots_T,
        lora.ranks_S,
        lora.scalings_S,
        out_PTO,
        rows,
        size,
        outputs,
        slots,
        triton.cdiv(triton.cdiv(size, len(out_PTO)), block_d) * block_d,
        x_PTD.stride(0),
        x_PTD.stride(1),
        weight_SOD.stride(0),
        weight_SOD.stride(1),
        out_PTO.stride(0),
        out_PTO.stride(1),
        TO_RANK=to_rank,
        PARTS=len(x_PTD),
        UPCAST=x_PTD.device.type == "cpu",  # the interpreter has no products of bfloat16
        BLOCK_T=block_t,
        BLOCK_O=block_o,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=1 if x_PTD.element_size() > 2 else 2,
    )

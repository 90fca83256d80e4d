"""`gated` for GPUs: one pass in place of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import with_plain_rows

_BLOCK = 1024


@triton.jit
def gated_kernel(x_ptr, out_ptr, x_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh z) is the sigmoid of 2z; 1.5957... is 2 sqrt(2 / pi)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    else:
        gate = tl.where(gate < 0.0, 0.0, gate)
    tl.store(out_ptr + row * size + column, gate * up, mask=inside)


def gated(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """Arguments and result as for the public function."""
    gate_up_TF = with_plain_rows(gate_up_TF)
    rows, size = len(gate_up_TF), gate_up_TF.shape[1] // 2
    out_TF = torch.empty(rows, size, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if out_TF.numel() > 0:
        gated_kernel[(rows, triton.cdiv(size, _BLOCK))](
            gate_up_TF, out_TF, gate_up_TF.stride(0), size, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4
        )
    return out_TF

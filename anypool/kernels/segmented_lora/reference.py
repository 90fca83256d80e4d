"""`segmented_lora` in plain torch: two products per run of rows of one adapter."""

from __future__ import annotations

import torch

from anypool.kernels.segmented_lora.rows import LoRARows
from anypool.kernels.segmented_lora.stack import LoRAStack


def segmented_lora(y_TO: torch.Tensor, x_TD: torch.Tensor, lora: LoRAStack, rows: LoRARows) -> None:
    """Arguments as for the public function; `y_TO` is of exactly O columns."""
    for start, end, slot in rows.runs():
        rank = lora.ranks[slot]
        if rank > 0:
            inner_LR = x_TD[start:end] @ lora.a_SRD[slot, :rank].T
            y_TO[start:end].addmm_(inner_LR, lora.b_SOR[slot, :, :rank].T, alpha=lora.scalings[slot])

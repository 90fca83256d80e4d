"""What low-rank adapters (LoRA) add to a product, in a packed batch whose rows belong to several of them."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.segmented_lora import reference
from anypool.kernels.segmented_lora.rows import BASE, LoRARows
from anypool.kernels.segmented_lora.stack import LoRAStack

__all__ = ["BASE", "LoRARows", "LoRAStack", "segmented_lora"]


def segmented_lora(
    y_TO: torch.Tensor, x_TD: torch.Tensor, lora: LoRAStack, rows: LoRARows, *, offset: int = 0
) -> torch.Tensor:
    """y += scaling (x A^T) B^T, in place, each row with its adapter's A, B and scaling (Hu et al., arXiv:2106.09685).

    A fused layer calls it once per part, each part with its own `lora` and the `offset` of its outputs. Sums are made
    in float32; x A^T is rounded to the weights' dtype.

    Args:
        y_TO: `[T, offset + O or more]`, any float dtype: the product x W^T, which is added to. Its last dimension lies
            element by element.
        x_TD: `[T, D]`, of y's dtype.
        lora: The adapters' weights for this product, O rows each, of y's dtype and on its device.
        rows: Whose each row is. Rows of none, and of adapters that have nothing for this product, stay as they are.
        offset: Column of y that the first of the O outputs is added to.

    Returns:
        `y_TO` itself.
    """
    assert y_TO.dim() == 2 and x_TD.dim() == 2 and len(y_TO) == len(x_TD) and y_TO.stride(1) == 1
    assert 0 <= offset <= y_TO.shape[1] - lora.out_features and x_TD.shape[1] == lora.in_features
    assert y_TO.dtype == x_TD.dtype == lora.a_SRD.dtype, "rows and weights of different dtypes"
    assert len(rows.slots_T) == len(y_TO)
    if rows.segments == () or len(y_TO) == 0:
        return y_TO
    part_TO = y_TO[:, offset : offset + lora.out_features]
    if not uses_triton(x_TD):
        reference.segmented_lora(part_TO, x_TD, lora, rows)
        return y_TO
    from anypool.kernels.segmented_lora import triton

    triton.segmented_lora(part_TO, x_TD, lora, rows.slots_T)
    return y_TO

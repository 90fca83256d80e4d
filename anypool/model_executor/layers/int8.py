"""Linear layers in eight bits on the CPU: weights per output channel, inputs per row as they come.

oneDNN multiplies the integers, through operations that torch has for its compiler under private names. Inputs are
unsigned with a zero point in the middle, since the instructions of CPUs without AMX multiply unsigned by signed ones.
It takes one scale for a whole input, so the product is computed with the scale 1 and each row is multiplied by its own
afterwards: what a row becomes depends on no other row, and so a text's vector on no other text of its batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from anypool.model_executor.layers.activation import Activation
from anypool.model_executor.layers.products import Product

# Inputs are cut into steps of a 126th: a scale that bfloat16 rounds down makes up to 126.5 of it.
_INPUT_LEVELS = 126
_ZERO = 128
_WEIGHT_LEVELS = 127
# Below it everything is 0, and nothing is divided by 0.
_LEAST = 1e-30


class QuantizedRows(NamedTuple):
    """Rows of integers and the scale of each.

    Attributes:
        values: `[..., in]` uint8, of which 128 stands for 0.
        scales: `[..., 1]` in the dtype that the rows had.
    """

    values: torch.Tensor
    scales: torch.Tensor


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Rows as integers from 2 to 254, 128 taken off, times a scale; a row with NaN or infinity has such a scale."""
    scales = _largest(x).clamp_(min=_LEAST).div_(_INPUT_LEVELS)
    # By way of int16, since torch narrows integers several times faster than it makes bytes of floats. Turning the
    # highest bit adds 128.
    values = x.div(scales).round_().to(torch.int16).to(torch.int8).view(torch.uint8).bitwise_xor_(_ZERO)
    return QuantizedRows(values, scales)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """`[..., 1]` of the largest absolute values.

    Without its sign a float orders like the integer of its bits, with NaN at the top. torch finds the largest integer
    several times faster than the largest bfloat16.
    """
    if x.dtype != torch.bfloat16:
        return x.abs().amax(-1, keepdim=True)
    return x.view(torch.int16).bitwise_and(0x7FFF).amax(-1, keepdim=True).view(torch.bfloat16)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[out, in]` int8 from -127 to 127, and `[out]` float32 scales."""
    exact = weight.float()
    scales = exact.abs().amax(1).clamp_(min=_LEAST).div_(_WEIGHT_LEVELS)
    return exact.div(scales[:, None]).round_().to(torch.int8), scales


def rounding_error(weight: torch.Tensor) -> float:
    """How far a weight is from itself in eight bits, as a part of its length."""
    exact = weight.float()
    values, scales = quantize_weight(exact)
    return float((values * scales[:, None] - exact).norm() / exact.norm().clamp_min(_LEAST))


class Int8Product:
    """The product of integers, in the dtype of its input.

    Args:
        weight: `[out, in]` float32 or bfloat16 on the CPU.
        bias: `[out]` of the same dtype, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        values, self.scales = quantize_weight(weight)
        self.weight = torch.ops.onednn.qlinear_prepack(values, None)
        self.zeros = torch.zeros(len(values), dtype=torch.int32)
        self.dtype = weight.dtype
        self.bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        *,
        act: Activation | None = None,
        add: torch.Tensor | None = None,
        mul: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._multiply(quantize_rows(x), act=act, add=add, mul=mul)

    def gated(self, x: torch.Tensor, up: Product, act: Activation) -> torch.Tensor:
        assert isinstance(up, Int8Product)
        rows = quantize_rows(x)
        return up._multiply(rows, mul=self._multiply(rows, act=act))

    def plain_weight(self) -> torch.Tensor:
        values: torch.Tensor = self.weight.to_dense().t()
        return (values * self.scales[:, None]).to(self.dtype)

    def _multiply(
        self,
        rows: QuantizedRows,
        *,
        act: Activation | None = None,
        add: torch.Tensor | None = None,
        mul: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Activation and sum come after the row's scale, so oneDNN cannot do them.
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows.values.reshape(-1, rows.values.shape[-1]),
            1.0,
            _ZERO,
            self.weight,
            self.scales,
            self.zeros,
            None,
            1.0,
            0,
            rows.scales.dtype,
            "none",
            [],
            "",
        ).view(*rows.values.shape[:-1], len(self.scales))
        y = y.mul_(rows.scales) if self.bias is None else torch.addcmul(self.bias, y, rows.scales, out=y)
        if act is not None:
            return act(y)
        if add is not None:
            return y.add_(add)
        return y if mul is None else y.mul_(mul)


@cache
def int8_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies integers here, the largest of them included, which older CPUs let overflow."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (40, 72), generator=generator).float()
    x = torch.randint(-126, 127, (5, 72), generator=generator).float()
    weight[:, 0], weight[0], x[:, 0], x[0] = 127, 127, 126, 126
    try:
        y = Int8Product(weight.to(dtype), None)(x.to(dtype))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(y.float(), x @ weight.t(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0.5)

"""Ways of computing a linear layer's product, and which of them this machine takes.

oneDNN multiplies by a weight that is stored in its own order once, and ends the product with the activation, the sum or
the factor that follows. In bfloat16 that is up to twice as fast as `F.linear`, which reorders the weight every time; in
float32 it is as fast or faster on both AMD and Intel CPUs. torch has these operations for its compiler, under private
names, so they are tried on a small product first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from anypool.errors import ConfigError
from anypool.model_executor.layers.activation import ACTIVATIONS, Activation


class Product(Protocol):
    """x W^T + b, followed by at most one of an activation, a sum and a factor."""

    def __call__(
        self,
        x: torch.Tensor,
        *,
        act: Activation | None = None,
        add: torch.Tensor | None = None,
        mul: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gated(self, x: torch.Tensor, up: Product, act: Activation) -> torch.Tensor:
        """act(this product of x) times `up` of x, which is computed the same way."""

    def plain_weight(self) -> torch.Tensor:
        """The weight, as exactly as it is held."""


MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]


class OneDnnProduct:
    """oneDNN with a weight in its own order.

    Args:
        weight: `[out, in]` float32 or bfloat16 on the CPU.
        bias: `[out]` of the same dtype, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        *,
        act: Activation | None = None,
        add: torch.Tensor | None = None,
        mul: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor
        if add is not None:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
        elif mul is not None:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, mul, self.weight, self.bias, "mul")
        else:
            operation, algorithm = ("none", "") if act is None else act.onednn
            y = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, operation, [], algorithm)
        return y

    def gated(self, x: torch.Tensor, up: Product, act: Activation) -> torch.Tensor:
        return up(x, mul=self(x, act=act))

    def plain_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.weight.to_dense()
        return weight


CPU_LINEAR = "ANYPOOL_CPU_LINEAR"
_WAYS = ("auto", "plain", "onednn")
_chosen: str | None = None


@contextmanager
def cpu_linear(way: str) -> Iterator[None]:
    """Models loaded inside compute linear layers on the CPU this way: auto, plain or onednn."""
    global _chosen
    before, _chosen = _chosen, way
    try:
        yield
    finally:
        _chosen = before


def pick_product(dtype: torch.dtype) -> MakeProduct | None:
    """The way of linear layers on this CPU; None for `F.linear`.

    `ANYPOOL_CPU_LINEAR` decides, or `cpu_linear`. "auto" is oneDNN where it works on x86; on other CPUs nobody has
    measured it, so there it has to be asked for.
    """
    way = _chosen or os.environ.get(CPU_LINEAR, "auto")
    if way not in _WAYS:
        raise ConfigError(f"{CPU_LINEAR}={way!r} is unknown; known: {', '.join(_WAYS)}")
    if way == "plain" or (way == "auto" and not _is_x86()):
        return None
    works = onednn_works(dtype)
    if way == "onednn" and not works:
        raise ConfigError(f"{CPU_LINEAR}={way!r}: oneDNN does not multiply by packed {dtype} weights here")
    return OneDnnProduct if works else None


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed products exist here and equal `F.linear`, with each thing that may follow."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, other, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 24), (5, 40), (40, 24), (40,))
    )
    plain = F.linear(x.float(), weight.float(), bias.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    try:
        product = OneDnnProduct(weight, bias)
        found = [product(x), product(x, add=other), product(x, mul=other)]
        found += [product(x, act=act) for act in ACTIVATIONS.values()]
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = [plain, plain + other, plain * other, *(act(plain) for act in ACTIVATIONS.values())]
    return all(
        torch.allclose(y.float(), z, atol=tolerance, rtol=tolerance) for y, z in zip(found, expected, strict=True)
    )


def _is_x86() -> bool:
    return "avx" in torch.backends.cpu.get_cpu_capability().lower()

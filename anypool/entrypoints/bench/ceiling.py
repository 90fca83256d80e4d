"""How fast this machine multiplies matrices, and how much of that a token asks for."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.packing import is_foreign_linear
from anypool.model_executor.layers.products import Product

# Rows of the input, its size, and the result's. Large ones, which keep the cores busiest.
_SHAPES = ((4096, 1024, 4096), (2048, 1024, 4096), (2048, 768, 3072))
_REPETITIONS = 5


def flop_per_token(model: nn.Module) -> int:
    """Multiplications and additions in a model's linear layers for one token: 2 x inputs x outputs of each.

    Heads and what else belongs to the pooler are left out: most of them run once per text.
    """
    return sum(2 * inputs * outputs for inputs, outputs in map(_sizes, _linears(model)))


@torch.inference_mode()
def measure_ceiling(model: nn.Module) -> float:
    """FLOP per second of the kind of product that most of a model's linear layers are.

    The best of several repetitions of several shapes. A product in eight bits includes rounding its input.
    """
    kinds = Counter(_kind(linear) for linear in _linears(model))
    [((kind, dtype), _)] = kinds.most_common(1)
    return max(_measure(kind, dtype, *shape) for shape in _SHAPES)


def _linears(model: Any) -> list[Any]:
    pooler = getattr(model, "pooler", None)
    left = set(pooler.modules()) if isinstance(pooler, nn.Module) else set()
    return [
        module
        for module in model.modules()
        if module not in left and (isinstance(module, Linear) or is_foreign_linear(module))
    ]


def _sizes(linear: Any) -> tuple[int, int]:
    if isinstance(linear, (Linear, nn.Linear)):
        return linear.in_features, linear.out_features
    inputs, outputs = linear.weight.shape  # stored the other way round
    return inputs, outputs


def _kind(linear: Any) -> tuple[Any, torch.dtype]:
    """The class of its product, None for torch's, and the dtype of its input."""
    products: tuple[Product, ...] = getattr(linear, "products", ())
    return type(products[0]) if products else None, linear.weight.dtype


def _measure(kind: Any, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    product = (lambda x: F.linear(x, weight)) if kind is None else kind(weight, None)
    product(x)
    times = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - began)
    return 2 * rows * inputs * outputs / min(times)

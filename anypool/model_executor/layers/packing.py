"""Hands the linear layers of a loaded model to the fastest product that this machine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anypool.model_executor.layers.int8 import Int8Product, rounding_error
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.products import pick_product


def pack_linears(model: nn.Module, *, leave: Iterable[nn.Module] = ()) -> None:
    """Packs every `Linear` of a model on the CPU.

    Args:
        model: It has its weights.
        leave: Modules that stay plain, such as heads.
    """
    left, shared = set(leave), shared_parameters(model)
    for module in model.modules():
        if not isinstance(module, Linear) or module in left or module.products or id(module.weight) in shared:
            continue
        make = pick_product(module.weight.dtype) if module.weight.device.type == "cpu" else None
        if make is not None:
            module.pack(make)


def replace_linears(model: nn.Module) -> Callable[[], None]:
    """Puts a packed `Linear` in the place of torch's and transformers' linear layers on the CPU.

    Layers whose weight another module has as well stay, since a packed weight would be a second copy.

    Returns:
        What puts them back.
    """
    shared = shared_parameters(model)
    replaced: dict[Any, Linear] = {}
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # a module may stand in several places
        if is_foreign_linear(child)
    ]
    for parent, name, child in found:
        if child not in replaced and id(child.weight) not in shared and child.weight.device.type == "cpu":
            make = pick_product(child.weight.dtype)
            if make is not None:
                replaced[child] = _ours(child)
                child.weight = None
                replaced[child].pack(make)
        if child in replaced:
            setattr(parent, name, replaced[child])

    def restore() -> None:
        for child, ours in replaced.items():
            ours.unpack()
            weight = ours.weight if type(child) is nn.Linear else ours.weight.t().contiguous()
            child.weight = nn.Parameter(weight, requires_grad=False)
        for parent, name, child in found:
            setattr(parent, name, child)

    return restore


# Layers that stay as they are when a model is quantised: narrow ones, where quantising the input costs more than the
# product saves and which are often sensitive, such as routers; and those with a few weights so much larger than the
# rest of their row that eight bits hold little of it. Rows of a normal distribution round to within 0.007.
_NARROW = 64
_MOST_ROUNDING = 0.03


@dataclass(frozen=True)
class QuantizedLayers:
    """Names of the linear layers that were quantised, and of those that were left."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]


def quantize_linears(model: nn.Module, *, leave: Iterable[nn.Module] = ()) -> QuantizedLayers:
    """Puts eight-bit products into the `Linear`s of a model on the CPU, one at a time.

    Args:
        model: It has its weights, packed or not.
        leave: Modules that stay as they are, such as heads.
    """
    left, shared = set(leave), shared_parameters(model)
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module not in left and id(module.weight) not in shared:
            names[_quantize(module)].append(name)
    return QuantizedLayers(tuple(names[True]), tuple(names[False]))


def _quantize(linear: Linear) -> bool:
    """Quantises a layer unless it is one to keep; whether it did."""
    if min(linear.in_features, linear.out_features // linear.pieces) < _NARROW:
        return False
    before = linear.products
    if before:
        linear.unpack()
    if rounding_error(linear.weight) > _MOST_ROUNDING:
        if before:
            linear.pack(type(before[0]))
        return False
    linear.pack(Int8Product)
    return True


def is_foreign_linear(module: Any) -> bool:
    """Whether a module is torch's linear layer, or GPT-2's, which stores the weight the other way round."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that several modules have, such as an embedding tied to an output projection."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def _ours(foreign: Any) -> Linear:
    weight: torch.Tensor = foreign.weight if type(foreign) is nn.Linear else foreign.weight.t()
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = foreign.bias
    linear.is_stored_turned = type(foreign) is not nn.Linear
    return linear.eval()

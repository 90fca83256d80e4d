"""What a process has of an adapter, where several hold a model together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anypool.adapters.lora_places import Place
from anypool.errors import UnsupportedArchitectureError
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.split import Share
from anypool.model_executor.weights.lora import ModulePatch


def own_share(place: Place, patch: ModulePatch, name: str) -> tuple[Place, ModulePatch]:
    """The outputs of a layer that are computed here, and what an adapter has for this process's part of the layer.

    Of a layer split by columns B has rows of its own, of one split by rows A has columns; the rest is whole.

    Args:
        place: In the whole layer.
        patch: For the whole of it.
        name: Of the adapter, for messages.

    Raises:
        UnsupportedArchitectureError: It is a DoRA, whose lengths are those of rows that no process has.
    """
    linear = place.module
    if not isinstance(linear, Linear) or linear.split is None:
        return place, patch
    if linear.split == "row":
        if patch.magnitude is not None:
            raise UnsupportedArchitectureError(
                f"{name}: the adapter is a DoRA, and {patch.name} is split over processes by its input: merge the "
                "adapter into its base with peft and save the result, or leave tensor_parallel_size at 1"
            )
        columns = slice(linear.columns.start, linear.columns.stop)
        a, weight = (None if one is None else one[:, columns] for one in (patch.a, patch.weight))
        return place, replace(patch, a=a, weight=weight)
    names = list(linear.rows)
    before = [_size(linear.rows[part]) for part in names[: names.index(place.part)]]
    rows = linear.rows[place.part]
    index = torch.cat([torch.arange(part.start, part.stop) for part in rows])
    own: dict[str, Any] = {
        kind: None if (whole := getattr(patch, kind)) is None else whole[index]
        for kind in ("b", "b_bias", "magnitude", "weight", "bias")
    }
    return replace(place, start=sum(before), size=_size(rows)), replace(patch, **own)


def _size(share: Share) -> int:
    return sum(map(len, share))

"""Low-rank adapters on a loaded model: in slots beside its weights, request by request, or merged into them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anypool.adapters.lora_places import Place, Places, in_features, out_features
from anypool.adapters.lora_shares import own_share
from anypool.errors import UnsupportedArchitectureError, WeightsError
from anypool.model_executor.distributed import ranks
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.lora import (
    EmbeddingLoRA,
    EmbeddingPatch,
    LinearLoRA,
    LoRASlots,
    Part,
    hook_embedding,
    hook_linear,
)
from anypool.model_executor.models.two_tower import TwoTowerModel
from anypool.model_executor.weights.lora import ModulePatch, PeftAdapter


@dataclass(frozen=True)
class FittedAdapter:
    """An adapter whose every tensor has found its place.

    Attributes:
        adapter: It.
        backbone: What it has for layers of the backbone.
        heads: What it has for layers of heads.
    """

    adapter: PeftAdapter
    backbone: tuple[tuple[Place, ModulePatch], ...]
    heads: tuple[tuple[Place, ModulePatch], ...]


class LoRAModel:
    """A loaded model that takes adapters.

    Args:
        model: The pooling model, with its poolers.
        places: Its layers.
        slots: Room for adapters.

    Attributes:
        slots: The room.
        tasks: Slots of the checkpoint's own adapters, by name. They are the first ones, and stay.
    """

    def __init__(self, model: Any, places: Places, slots: LoRASlots) -> None:
        self._model, self._places, self.slots = model, places, slots
        self._layers: dict[nn.Module, LinearLoRA | EmbeddingLoRA] = {}
        self.tasks: dict[str, int] = {}
        if isinstance(model, TwoTowerModel):  # no other class has places in its vision tower
            model.features.slots = slots

    @property
    def mixes(self) -> bool:
        """Whether a batch may have several adapters."""
        return bool(getattr(self._model, "mixes_adapters", False))

    @property
    def room_bytes(self) -> int:
        """What the slots take once every linear layer has had an adapter: A and B of the highest rank for each.

        What adapters have beside, such as tables and heads of their own, comes on top.
        """
        numbers = 0
        for place in self._places.linear:
            module = place.module
            pieces, inputs, outputs = 1, in_features(module), place.size
            if isinstance(module, Linear):  # of one that is split over processes, its share
                pieces, inputs = 1 if module.parts else module.pieces, module.in_features
                outputs = outputs * module.out_features // module.out_size
            numbers += pieces * inputs + outputs
        return self.slots.slots * self.slots.rank * numbers * self.slots.dtype.itemsize

    def fit(self, adapter: PeftAdapter) -> FittedAdapter:
        """Finds the place of each of an adapter's tensors, and checks that it can be there beside others.

        Raises:
            WeightsError: A tensor has no place or another shape, or the rank is too high.
            UnsupportedArchitectureError: It changes what can only be merged.
        """
        fitted = fit(self._places, adapter)
        for place, patch in fitted.backbone:
            _refuse_what_is_merged_only(place, patch, adapter.name)
            if patch.rank > self.slots.rank:
                raise WeightsError(
                    f"{adapter.name}: the adapter has rank {patch.rank} for {patch.name}, and max_lora_rank is "
                    f"{self.slots.rank}: start with max_lora_rank={patch.rank}"
                )
        return fitted

    def keep(self, tasks: Mapping[str, PeftAdapter]) -> None:
        """Puts the checkpoint's own adapters into the first slots. Errors as in `fit`."""
        for slot, (name, adapter) in enumerate(tasks.items()):
            self.put(slot, self.fit(adapter))
            self.tasks[name] = slot

    def put(self, slot: int, fitted: FittedAdapter) -> None:
        """Puts an adapter into a slot that no running batch reads."""
        self.clear(slot)
        for place, patch in fitted.backbone:
            if place.is_elsewhere:
                continue
            layer = self._layer(place)
            if isinstance(layer, EmbeddingLoRA):
                layer.put(slot, _embedding_patch(patch, place))
            else:
                parts, bias_O = _linear_patch(patch, place)
                if getattr(place.module, "split", None) == "row" and ranks().tp_rank > 0:
                    bias_O = None  # the first process adds it to the sum
                layer.put(slot, parts, bias_O)
        if fitted.heads:
            self.slots.poolers[slot] = self._own_poolers(fitted)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        for layer in self._layers.values():
            layer.clear(slot)
        self.slots.poolers.pop(slot, None)

    def _layer(self, place: Place) -> LinearLoRA | EmbeddingLoRA:
        """What adapters do to a layer, which they have nothing for so far where it is new."""
        module = place.module
        if module in self._layers:
            return self._layers[module]
        made: LinearLoRA | EmbeddingLoRA
        if place.is_table:
            made = EmbeddingLoRA(self.slots, getattr(module, "embed_scale", None))
            if isinstance(module, Embedding):
                module.lora = made
            else:
                hook_embedding(module, made)
        else:
            made = LinearLoRA(self.slots, module.in_features if isinstance(module, Linear) else in_features(module))
            if isinstance(module, Linear):
                module.lora = made
            else:
                hook_linear(module, made)
        self._layers[module] = made
        return made

    def _own_poolers(self, fitted: FittedAdapter) -> Any:
        """The model's poolers with an adapter's heads. What it does not change is shared."""
        memo: dict[int, Any] = {id(self._model): self._model}
        for module in (self._model, self._model.pooler):
            memo |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        poolers = copy.deepcopy(self._model.pooler, memo)
        for place, patch in fitted.heads:
            _merge_linear(memo[id(place.module)], patch)
        return poolers


def rank_of(adapter: PeftAdapter) -> int:
    """The highest rank that an adapter has for a layer."""
    return max((patch.rank for patch in adapter.patches.values()), default=0)


def fit(places: Places, adapter: PeftAdapter) -> FittedAdapter:
    """Finds the place of each of an adapter's tensors.

    Raises:
        WeightsError: A tensor has no place, or another shape; or none of them changes anything.
    """
    found: list[tuple[Place, ModulePatch]] = []
    for name, patch in adapter.patches.items():
        place = places.find(name)
        if patch.token_rows is not None and places.reads_lm_head:
            raise UnsupportedArchitectureError(
                f"{adapter.name}: the adapter has tokens of its own (trainable_token_indices), and the model's scores "
                "are rows of the LM head, where they may count too"
            )
        if place is not None:
            _check_shapes(place, patch, adapter.name)
            found.append(own_share(place, patch, adapter.name))
        elif not places.is_unused(name) and not _is_plain(patch, places):
            raise WeightsError(
                f"{adapter.name}: the adapter's {name} has no place in the model: it is for another one, or for a part "
                "that does not run here"
            )
        elif not places.is_unused(name):
            found.append((Place(None, 0, 0), patch))
    if not found:
        raise WeightsError(f"{adapter.name}: the adapter changes nothing that this model runs")
    in_heads = tuple(one for one in found if one[0].in_pooler)
    return FittedAdapter(adapter, tuple(one for one in found if not one[0].in_pooler), in_heads)


@torch.no_grad()
def merge(places: Places, adapter: PeftAdapter) -> None:
    """Adds an adapter to the weights of a model, for good: `W + scaling * B A`, in float32, then in W's dtype.

    Raises:
        WeightsError: A tensor has no place, or another shape; or none of them changes anything.
    """
    fitted = fit(places, adapter)
    for place, patch in (*fitted.backbone, *fitted.heads):
        if place.is_elsewhere:
            continue
        if place.module is None:
            _merge_parameters(places, patch)
        elif place.is_table:
            table, rows = place.module.weight, slice(None)
            if isinstance(place.module, Embedding):
                table, rows = place.module.table(), slice(place.module.rows.start, place.module.rows.stop)
            # A new parameter: a head that is tied to the table keeps what it was trained with.
            place.module.weight = nn.Parameter(patch.merged_table(table)[rows].to(table.dtype), requires_grad=False)
        else:
            _merge_linear(place.module, patch, place)


def _merge_parameters(places: Places, patch: ModulePatch) -> None:
    for part, tensor in (("weight", patch.weight), ("bias", patch.bias)):
        if tensor is not None:
            parameter = places.parameter(f"{patch.name}.{part}")
            assert parameter is not None
            parameter.copy_(tensor)


def _merge_linear(module: Any, patch: ModulePatch, place: Place | None = None) -> None:
    """Merges a patch into a linear layer, or into some outputs of it, however it is held."""
    make = type(module.products[0]) if isinstance(module, Linear) and module.products else None
    if make is not None:
        module.unpack()
    is_turned = not isinstance(module, (Linear, nn.Linear)) and module.weight.dim() == 2  # GPT-2's
    weight, bias = module.weight.detach().clone(), None if module.bias is None else module.bias.detach().clone()
    outputs = slice(0, None) if place is None else slice(place.start, place.start + place.size)
    if patch.weight is not None and getattr(module, "is_stored_turned", is_turned):
        patch = replace(patch, weight=patch.weight.t())
    part_OI = (weight.t() if is_turned else weight)[outputs]
    part_OI.copy_(patch.merged(part_OI))
    merged_bias = patch.merged_bias(None if bias is None else bias[outputs])
    if merged_bias is not None:
        if bias is None:
            bias = weight.new_zeros(weight.shape[1] if is_turned else len(weight))
        bias[outputs] = merged_bias.to(bias.dtype)
        module.bias = nn.Parameter(bias, requires_grad=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if make is not None:
        module.pack(make)


def _is_plain(patch: ModulePatch, places: Places) -> bool:
    """Whether all that it has stands in place of whole parameters of the backbone, such as a norm's."""
    if patch.rank or patch.token_rows is not None or patch.magnitude is not None:
        return False
    given = {"weight": patch.weight, "bias": patch.bias}
    parameters = {part: places.parameter(f"{patch.name}.{part}") for part, x in given.items() if x is not None}
    return all(one is not None and one.shape == given[part].shape for part, one in parameters.items())  # type: ignore[union-attr]


def _check_shapes(place: Place, patch: ModulePatch, name: str) -> None:
    """Refuses tensors that do not have the shapes of the layer that they are for."""
    module: Any = place.module
    rows = place.size
    size = module.weight.shape[1] if place.is_table else None
    if not place.is_table and module.weight.dim() == 2:  # a norm's has one dimension
        size = in_features(module)
    fits = {
        "lora_A": (patch.a, (patch.rank, size)),
        "lora_B": (patch.b, (rows, patch.rank)),
        "lora_B.bias": (patch.b_bias, (rows,)),
        "lora_magnitude_vector": (patch.magnitude, (rows,)),
        "lora_embedding_A": (patch.embedding_a, (patch.rank, rows)),
        "lora_embedding_B": (patch.embedding_b, (size, patch.rank)),
        "bias": (patch.bias, (rows,)),
        "token_adapter": (patch.token_rows, (len(patch.token_ids), size)),
    }
    for part, (tensor, shape) in fits.items():
        only_for_other = part.startswith("lora_") and place.is_table != part.startswith("lora_embedding")
        if tensor is not None and (tuple(tensor.shape) != shape or only_for_other):
            raise WeightsError(
                f"{name}: the adapter's {patch.name}.{part} has shape {list(tensor.shape)}, the layer is for "
                f"{[one for one in shape if one is not None]}: it was trained on another model"
            )
    if patch.weight is not None and patch.weight.numel() != rows * (size or 1):
        raise WeightsError(
            f"{name}: the adapter's {patch.name}.weight has shape {list(patch.weight.shape)}, the layer's is "
            f"{[rows] if size is None else [rows, size]}"
        )
    if patch.token_ids and not 0 <= min(patch.token_ids) <= max(patch.token_ids) < rows:
        raise WeightsError(f"{name}: the adapter has a row for token {max(patch.token_ids)}, the table has {rows}")


def _refuse_what_is_merged_only(place: Place, patch: ModulePatch, name: str) -> None:
    what = None
    if place.module is None:
        what = f"changes {patch.name}, which is neither a linear layer nor the table of embeddings"
    elif patch.magnitude is not None:
        what = f"is a DoRA: it scales the weight of {patch.name}"
    elif patch.weight is not None and not place.is_table:
        what = f"has a whole weight of its own for {patch.name}"
    if what is not None:
        raise UnsupportedArchitectureError(
            f"{name}: the adapter {what}, which cannot be done request by request: merge it while loading, with lora="
        )


def _embedding_patch(patch: ModulePatch, place: Place) -> EmbeddingPatch:
    # PEFT saves a table that an adapter is for beside it, as it was.
    table = patch.weight
    if table is not None and torch.equal(table.to(place.module.weight), place.module.weight):
        table = None
    return EmbeddingPatch(
        a_VR=None if patch.embedding_a is None else patch.embedding_a.t(),
        b_RE=None if patch.embedding_b is None else patch.embedding_b.t() * patch.scaling,
        table_VE=table,
        ids=patch.token_ids,
        rows_IE=patch.token_rows,
    )


def _linear_patch(patch: ModulePatch, place: Place) -> tuple[Sequence[Part], torch.Tensor | None]:
    """A and B for the outputs that a layer computes at once, and what is added to its bias."""
    parts = []
    if patch.a is not None and patch.b is not None:
        pieces = place.module.pieces if isinstance(place.module, Linear) and not place.module.parts else 1
        start = place.start
        for b_OR in patch.b.chunk(pieces):
            parts.append(Part(start, patch.a, b_OR, patch.scaling))
            start += len(b_OR)
    own = place.module.bias
    base_O = None if own is None else own[place.start : place.start + place.size].float().cpu()
    bias_O = patch.merged_bias(base_O)
    if bias_O is None or (patch.bias is None and patch.b_bias is None):
        return parts, None
    whole_O = torch.zeros(out_features(place.module))
    whole_O[place.start : place.start + place.size] = bias_O if base_O is None else bias_O - base_O
    return parts, whole_O

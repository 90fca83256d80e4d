"""Copies a checkpoint into a model and accounts for every tensor.

A model is built on the meta device. Its slots are the names under which a checkpoint may hold its parameters: a
fused `Linear` has one slot per part. A tensor goes to the slot of its name, after the class's renames, with or
without the `model.` prefix that separates `XForCausalLM` checkpoints from bare `XModel` ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from anypool.errors import WeightsError
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.split import Share, all_of
from anypool.model_executor.weights.checkpoint import Checkpoint

MAP_WEIGHTS = "ANYPOOL_MAP_WEIGHTS"
_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]


@dataclass(frozen=True)
class Slot:
    """A place for one checkpoint tensor: some rows of a parameter, or of the share of it that this process holds.

    Attributes:
        parameter: Where it goes.
        start: The first row there.
        shape: Of the tensor.
        rows: Rows of the tensor that are taken; None for all.
        columns: The same of its second dimension.
    """

    parameter: nn.Parameter
    start: int
    shape: tuple[int, ...]
    rows: Share | None = None
    columns: range | None = None

    def fill(self, tensor: torch.Tensor, *, stored: str, name: str) -> None:
        """Copies a tensor here, or raises a `WeightsError` where its shape or kind does not fit."""
        if tensor.dtype not in _WEIGHT_DTYPES or tensor.layout != torch.strided:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise WeightsError(
                f"{name}: tensor {stored!r} is {kind}; weights are float32, float64, bfloat16 or float16, "
                "and quantized ones are not supported"
            )
        if tuple(tensor.shape) != self.shape:
            raise WeightsError(
                f"{name}: tensor {stored!r} has shape {list(tensor.shape)}, the model expects {list(self.shape)}"
            )
        if keeps_mapped() and self._can_be(tensor):
            self.parameter.data = tensor
            return
        # A tensor of a file that is mapped is read where it is copied: what other processes hold, they read.
        if self.columns is not None:
            tensor = tensor[:, self.columns.start : self.columns.stop]
        start = self.start
        with torch.no_grad():
            for rows in all_of(self.shape[0]) if self.rows is None else self.rows:
                self.parameter[start : start + len(rows)].copy_(tensor[rows.start : rows.stop])
                start += len(rows)

    def _can_be(self, tensor: torch.Tensor) -> bool:
        """Whether the parameter can be this tensor as it is, rather than a copy of it."""
        own = self.parameter
        is_alike = (own.shape, own.dtype, own.device) == (tensor.shape, tensor.dtype, tensor.device)
        return is_alike and self.columns is None and tensor.is_contiguous()


def keeps_mapped() -> bool:
    """Whether weights stay in the mapped file of their checkpoint where they can be used as they are.

    Processes share such pages, and replicas are started so. Whoever writes over the file then writes over the weights,
    so an engine by itself copies them.
    """
    return os.environ.get(MAP_WEIGHTS) == "1"


def materialize(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> set[str]:
    """Gives memory to every meta parameter of a model, uninitialised. Parameters already in memory are moved.

    Returns:
        Names of the parameters that have values to come.
    """
    waiting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            data = (
                torch.empty_like(parameter, device=device, dtype=dtype) if parameter.is_meta else parameter.to(device)
            )
            setattr(module, name, nn.Parameter(data, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            assert not buffer.is_meta, f"buffer {name} of {type(module).__name__} has no values"
            module._buffers[name] = buffer.to(device)
    return waiting


def slots_of(model: nn.Module, *, only: set[str] | None = None) -> dict[str, Slot]:
    """Every slot of a model, or of some of its parameters, by checkpoint name."""
    slots: dict[str, Slot] = {}
    for prefix, module in model.named_modules():
        base = f"{prefix}." if prefix else ""
        parent = base[: -len(prefix.rsplit(".", 1)[-1]) - 1]
        for name, parameter in module.named_parameters(recurse=False):
            if only is not None and base + name not in only:
                continue
            if isinstance(module, Linear):
                for part, slot in _linear_slots(module, parameter):
                    slots[f"{parent}{part}.{name}" if part else base + name] = slot
            elif isinstance(module, Embedding):
                shape = (module.num_rows, *parameter.shape[1:])
                slots[base + name] = Slot(parameter, 0, shape, rows=(module.rows,))
            else:
                slots[base + name] = Slot(parameter, 0, tuple(parameter.shape))
    return slots


def _linear_slots(linear: Linear, parameter: nn.Parameter) -> Iterator[tuple[str, Slot]]:
    """The slot of each part of a layer's weight or bias; of the whole under "" where it has no parts."""
    is_weight, start = parameter.dim() == 2, 0
    for part, rows in linear.rows.items():
        size = linear.parts[part] if part else linear.out_size
        shape = (size, linear.in_size) if is_weight else (size,)
        yield part, Slot(parameter, start, shape, rows, linear.columns if is_weight else None)
        start += sum(map(len, rows))


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    name: str,
    renames: Renames = (),
    ignored: Iterable[str] = (),
    prefixes: Sequence[str] = ("", "model."),
    only: set[str] | None = None,
    elsewhere: frozenset[str] = frozenset(),
    progress: bool = False,
) -> None:
    """Fills a materialised model.

    Args:
        model: Its parameters have memory.
        checkpoint: The tensors.
        name: Of the model, for messages.
        renames: Regular expressions and replacements, applied in order to checkpoint names.
        ignored: Regular expressions of checkpoint names that this model has no use for, such as the LM head.
        prefixes: What may stand before a checkpoint name to make it a name of this model.
        only: Parameters to fill; None for all.
        elsewhere: Slots that the model has no parameters for here, since other processes fill them.
        progress: Whether a bar is shown.

    Raises:
        WeightsError: Tensors are missing, left over, given twice or of a wrong shape.
    """
    slots = slots_of(model, only=only)
    places = {**dict.fromkeys(elsewhere), **slots}
    targets, unused = _match(checkpoint.names(), places, renames, prefixes, [re.compile(p) for p in ignored])
    targets = {stored: slot for stored, slot in targets.items() if slot in slots}
    missing = sorted(set(slots) - set(targets.values()))
    if missing or unused:
        raise WeightsError(_complaint(name, missing, unused))
    hidden = None if progress else True  # where progress is asked for, only on a terminal
    bar = tqdm(total=len(targets), desc=f"Loading {name}", unit="tensor", disable=hidden, leave=False)
    with bar:
        for stored, tensor in checkpoint.tensors(set(targets)):
            slots[targets[stored]].fill(tensor, stored=stored, name=name)
            bar.update()


def _match(
    names: list[str],
    slots: Collection[str],
    renames: Renames,
    prefixes: Sequence[str],
    ignored: list[re.Pattern[str]],
) -> tuple[dict[str, str], list[str]]:
    """Checkpoint name -> slot name, and the checkpoint names that fit nowhere."""
    targets: dict[str, str] = {}
    taken: dict[str, str] = {}
    unused = []
    for stored in names:
        renamed = stored
        for pattern, replacement in renames:
            renamed = re.sub(pattern, replacement, renamed)
        slot = next((prefix + renamed for prefix in prefixes if prefix + renamed in slots), None)
        if slot is None:
            if not any(pattern.search(stored) for pattern in ignored):
                unused.append(stored)
        elif slot in taken:
            raise WeightsError(f"tensors {taken[slot]!r} and {stored!r} are both meant for {slot!r}")
        else:
            targets[stored], taken[slot] = slot, stored
    return targets, unused


def _complaint(name: str, missing: list[str], unused: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors that the model needs are missing: {_some(missing)}")
    if unused:
        parts.append(f"{len(unused)} tensors have no place in the model: {_some(unused)}")
    return f"{name}: " + "; ".join(parts)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def load_module(module: nn.Module, checkpoint: Checkpoint, *, name: str, renames: Renames = ()) -> None:
    """Fills a small module (a head) that already has memory, without prefixes and with nothing ignored."""
    load_weights(module, checkpoint, name=name, renames=renames, prefixes=("",))


def fill(module: nn.Module, checkpoint: Checkpoint, stored: Mapping[str, str], *, name: str) -> None:
    """Fills every parameter of a module that has memory from the tensors named for them.

    Args:
        module: The module.
        checkpoint: The tensors.
        stored: Parameter name -> tensor name.
        name: Of the model, for messages.

    Raises:
        WeightsError: A tensor is missing or of a wrong shape.
    """
    slots = slots_of(module)
    assert set(slots) == set(stored), "a parameter has no tensor, or a tensor no parameter"
    missing = sorted(set(stored.values()) - set(checkpoint.names()))
    if missing:
        raise WeightsError(_complaint(name, missing, []))
    targets = {tensor: parameter for parameter, tensor in stored.items()}
    for found, tensor in checkpoint.tensors(set(targets)):
        slots[targets[found]].fill(tensor, stored=found, name=name)


def construct(factory: Callable[[], nn.Module]) -> nn.Module:
    """Builds a module on the meta device: no memory, no initialisation."""
    with torch.device("meta"):
        return factory()

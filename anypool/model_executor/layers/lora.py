"""What low-rank adapters (LoRA) add to the layers of a model: each row of a batch gets what its own adapter has.

Adapters are in slots. A layer that no adapter has anything for knows nothing of them, and one that some have costs
nothing while a batch has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.segmented_lora import BASE, LoRARows, LoRAStack, segmented_lora


class LoRASlots:
    """Room for adapters, and whose the rows of the running batch are. All layers of a model share one.

    Args:
        slots: How many adapters there is room for.
        rank: The highest rank.
        dtype: Of hidden states, which the weights of adapters get as well.
        device: Where the model is.

    Attributes:
        is_active: Whether the running batch has an adapter.
        poolers: Poolers of adapters with heads of their own, by slot.
    """

    def __init__(self, slots: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.rank, self.dtype, self.device = slots, rank, dtype, device
        self.is_active = False
        self.poolers: dict[int, Any] = {}
        self._mixed: LoRARows | None = None
        self._alone = BASE
        self._made: dict[int, LoRARows] = {}

    @contextmanager
    def running(self, slots: Sequence[int], lengths: Sequence[int], rows: int) -> Iterator[None]:
        """Layers add what the adapters in these slots have to whatever they compute inside.

        Args:
            slots: Of each sequence's adapter; `BASE` for none; empty where no sequence has one.
            lengths: Rows of each sequence.
            rows: Rows of the batch, of which those behind the sequences are of no adapter.
        """
        if all(slot == BASE for slot in slots):
            yield
            return
        if len(set(slots)) == 1:  # then whatever a layer sees is that adapter's, in whatever order or shape
            self._alone = slots[0]
        else:
            self._mixed = LoRARows.pack(slots, lengths, device=self.device).extended(rows - sum(lengths))
        self.is_active = True
        try:
            yield
        finally:
            self.is_active, self._mixed, self._alone, self._made = False, None, BASE, {}

    def rows(self, count: int) -> LoRARows:
        """Whose each of the rows is that a layer sees."""
        if self._mixed is not None:
            assert len(self._mixed.slots_T) == count, "a layer of a mixed batch sees other rows than those of its texts"
            return self._mixed
        if count not in self._made:
            self._made[count] = LoRARows.pack([self._alone], [count], device=self.device)
        return self._made[count]


class Part(NamedTuple):
    """A and B of one adapter for some of a layer's outputs.

    Attributes:
        start: The first of these outputs.
        a_RD: `[r, D]`.
        b_OR: `[O, r]`.
        scaling: What their product is multiplied by.
    """

    start: int
    a_RD: torch.Tensor
    b_OR: torch.Tensor
    scaling: float


class LinearLoRA:
    """What adapters add to a linear layer.

    Args:
        slots: Those of the model.
        in_features: Size of the layer's input.
    """

    def __init__(self, slots: LoRASlots, in_features: int) -> None:
        self.slots, self.in_features = slots, in_features
        self._stacks: dict[tuple[int, int], LoRAStack] = {}
        self._biases: dict[int, torch.Tensor] = {}

    @property
    def is_active(self) -> bool:
        """Whether the running batch has an adapter."""
        return self.slots.is_active

    def put(self, slot: int, parts: Iterable[Part], bias_O: torch.Tensor | None) -> None:
        """Puts what an adapter has for this layer into its slot, in which nothing is.

        Args:
            slot: The slot.
            parts: A and B, for some outputs each; those of an output come once.
            bias_O: What is added to the layer's bias; None for nothing.
        """
        for start, a_RD, b_OR, scaling in parts:
            key = start, len(b_OR)
            if key not in self._stacks:
                self._stacks[key] = LoRAStack(
                    self.slots.slots,
                    self.slots.rank,
                    self.in_features,
                    len(b_OR),
                    dtype=self.slots.dtype,
                    device=self.slots.device,
                )
            self._stacks[key].put(slot, a_RD, b_OR, scaling)
        if bias_O is not None:
            self._biases[slot] = bias_O.to(self.slots.device, self.slots.dtype)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        for stack in self._stacks.values():
            stack.clear(slot)
        self._biases.pop(slot, None)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        """Adds to the layer's outputs, in place.

        Args:
            y: `[..., O]` outputs from `start` on, in memory of their own.
            x: `[..., D]` the layer's input.
            start: The first of these outputs.
        """
        y_TO, x_TD = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        rows = self.slots.rows(len(x_TD))
        for (first, size), stack in self._stacks.items():
            if start <= first and first + size <= start + y_TO.shape[1]:
                segmented_lora(y_TO, x_TD, stack, rows, offset=first - start)
        if self._biases:
            for low, high, slot in rows.runs():
                if slot in self._biases:
                    y_TO[low:high] += self._biases[slot][start : start + y_TO.shape[1]]
        return y


@dataclass(frozen=True, kw_only=True)
class EmbeddingPatch:
    """What an adapter does to a table of embeddings.

    Attributes:
        a_VR: `[V, r]` a row per id, or None.
        b_RE: `[r, E]` what turns it into what is added, scaling included.
        table_VE: `[V, E]` in place of the table.
        ids: Ids that have a row of their own.
        rows_IE: `[I, E]` these rows.
    """

    a_VR: torch.Tensor | None = None
    b_RE: torch.Tensor | None = None
    table_VE: torch.Tensor | None = None
    ids: tuple[int, ...] = ()
    rows_IE: torch.Tensor | None = None


class EmbeddingLoRA:
    """What adapters do to a table of embeddings.

    Args:
        slots: Those of the model.
        scale: What the layer multiplies its rows with; None for nothing.
    """

    def __init__(self, slots: LoRASlots, scale: torch.Tensor | None = None) -> None:
        self.slots, self.scale = slots, scale
        self._patches: dict[int, EmbeddingPatch] = {}

    @property
    def is_active(self) -> bool:
        """Whether the running batch has an adapter."""
        return self.slots.is_active

    def put(self, slot: int, patch: EmbeddingPatch) -> None:
        """Puts what an adapter has for this table into its slot."""

        def here(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(self.slots.device, self.slots.dtype)

        self._patches[slot] = EmbeddingPatch(
            a_VR=here(patch.a_VR),
            b_RE=here(patch.b_RE),
            table_VE=here(patch.table_VE),
            ids=patch.ids,
            rows_IE=here(patch.rows_IE),
        )

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._patches.pop(slot, None)

    def apply(self, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table as adapters have them.

        Args:
            y: `[..., E]` rows of the table.
            ids: `[...]` their ids.
        """
        y_TE, ids_T = y.view(-1, y.shape[-1]), ids.reshape(-1)
        for low, high, slot in self.slots.rows(len(ids_T)).runs():
            patch = self._patches.get(slot)
            if patch is not None:
                y_TE[low:high] = self._rows(y_TE[low:high], ids_T[low:high], patch)
        return y

    def _rows(self, y_LE: torch.Tensor, ids_L: torch.Tensor, patch: EmbeddingPatch) -> torch.Tensor:
        if patch.table_VE is not None:
            y_LE = self._scaled(F.embedding(ids_L, patch.table_VE))
        if patch.rows_IE is not None:
            own_I = torch.tensor(patch.ids, device=ids_L.device)
            is_own_LI = ids_L[:, None] == own_I
            own_LE = self._scaled(patch.rows_IE[is_own_LI.int().argmax(1)])
            y_LE = torch.where(is_own_LI.any(1, keepdim=True), own_LE, y_LE)
        if patch.a_VR is not None and patch.b_RE is not None:
            y_LE = y_LE + self._scaled(F.embedding(ids_L, patch.a_VR) @ patch.b_RE)
        return y_LE

    def _scaled(self, y_LE: torch.Tensor) -> torch.Tensor:
        return y_LE if self.scale is None else y_LE * self.scale.to(y_LE.dtype)


def hook_linear(module: nn.Module, lora: LinearLoRA) -> None:
    """Adds what adapters have to the outputs of a linear layer that is not ours."""

    def add(_: nn.Module, inputs: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        return lora.add_to(y.clone(), inputs[0]) if lora.is_active else y

    module.register_forward_hook(add)


def hook_embedding(module: nn.Module, lora: EmbeddingLoRA) -> None:
    """Gives rows of a table that is not ours as adapters have them."""

    def apply(_: nn.Module, inputs: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        return lora.apply(y.clone(), inputs[0]) if lora.is_active else y

    module.register_forward_hook(apply)

"""Which adapter each row of a packed batch belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

# The slot of rows that no adapter changes.
BASE = -1


@dataclass(frozen=True)
class LoRARows:
    """Adapters of a batch's rows, made once and used by every layer.

    Attributes:
        slots_T: `[T]` int32, on the device: the slot of each row's adapter, `BASE` for none. Kernels read it.
        segments: (first row, row after the last, slot) of each run of rows of one adapter, without those of none. Plain
            torch reads them; None where only the device knows, as in the memory that a CUDA graph reads.
    """

    slots_T: torch.Tensor
    segments: tuple[tuple[int, int, int], ...] | None = None

    @classmethod
    def pack(cls, slots: Sequence[int], lengths: Sequence[int], *, device: torch.device | str = "cpu") -> LoRARows:
        """The rows of sequences one after the other.

        Args:
            slots: Of each sequence's adapter; `BASE` for none.
            lengths: Rows of each sequence.
            device: Where the model runs.
        """
        slots_T = torch.tensor(slots, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        return cls(slots_T.to(device), tuple(_runs(zip(slots, lengths, strict=True))))

    def extended(self, fill: int) -> LoRARows:
        """With so many rows of no adapter behind them."""
        return LoRARows(F.pad(self.slots_T, (0, fill), value=BASE), self.segments)

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """The segments, which are fetched from the device where only that knows them."""
        if self.segments is not None:
            return self.segments
        return tuple(_runs((slot, 1) for slot in self.slots_T.tolist()))


def _runs(parts: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, int]]:
    end = 0
    for slot, run in groupby(parts, key=lambda part: part[0]):
        start, end = end, end + sum(length for _, length in run)
        if slot != BASE and end > start:
            yield start, end, slot

"""Where the sequences of a packed batch lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from anypool.model_executor.attention.padded import PaddedGroup, padded_groups


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a packed batch, as every attention backend sees them.

    Attributes:
        lengths: Tokens per sequence, on the host.
        cu_seqlens: `[N+1]` int32 on the device: sequence i is rows `cu_seqlens[i]:cu_seqlens[i+1]`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> AttentionMetadata:
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=cu_seqlens[1:])
        return cls(lengths, cu_seqlens.to(device))

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    def padded_groups(self, window: tuple[int, int]) -> tuple[PaddedGroup, ...]:
        """The groups of near lengths, for the layers of a window; made by the first of them."""
        if window not in self._padded_groups:
            self._padded_groups[window] = tuple(padded_groups(self.lengths, window))
        return self._padded_groups[window]

    @cached_property
    def _padded_groups(self) -> dict[tuple[int, int], tuple[PaddedGroup, ...]]:
        return {}

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbouring sequences of equal length as (first row, sequences, length)."""
        found: list[tuple[int, int, int]] = []
        row = 0
        for length in self.lengths:
            if found and found[-1][2] == length:
                first, count, _ = found[-1]
                found[-1] = (first, count + 1, length)
            else:
                found.append((row, 1, length))
            row += length
        return tuple(found)

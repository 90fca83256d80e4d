"""Cached keys in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """Keys before the sequences of a batch. Token p of sequence i is slot `table[i, p // B] * B + p % B`, B a block.

    Attributes:
        k_SGK: `[S, G, K]` keys of all slots.
        v_SGV: `[S, G, V]` their values.
        tables_NB: `[N, blocks]` int32, as wide as the longest needs; what lies beyond a sequence's length is not read.
        lengths_N: `[N]` int32 tokens before each sequence; 0 where there are none.
        block_size: Slots of a block.
    """

    k_SGK: torch.Tensor
    v_SGV: torch.Tensor
    tables_NB: torch.Tensor
    lengths_N: torch.Tensor
    block_size: int

    def of(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one sequence, in order."""
        position_P = torch.arange(int(self.lengths_N[sequence]), device=self.k_SGK.device)
        blocks_P = self.tables_NB[sequence, position_P // self.block_size].long()
        slots_P = blocks_P * self.block_size + position_P % self.block_size
        return self.k_SGK[slots_P], self.v_SGV[slots_P]

"""The weights of several adapters for one product, in slots."""

from __future__ import annotations

import torch


class LoRAStack:
    """A and B of each adapter, side by side, so that one launch serves all and a CUDA graph sees them change.

    Memory is allocated once. Ranks below the highest are filled up with zeros, which the CPU does not compute with.

    Args:
        slots: How many adapters there is room for.
        rank: The highest rank.
        in_features: D.
        out_features: O.
        dtype: Of the weights: that of the rows they multiply.
        device: Where they are.

    Attributes:
        a_SRD: `[S, R, D]`: projections to the rank.
        b_SOR: `[S, O, R]`: projections from the rank.
        ranks: Rank in each slot; 0 where the slot's adapter has nothing for this product.
        scalings: What each slot's result is multiplied by.
        ranks_S: `[S]` int32 `ranks` on the device.
        scalings_S: `[S]` float32 `scalings` on the device.
    """

    def __init__(
        self,
        slots: int,
        rank: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.a_SRD = torch.zeros(slots, rank, in_features, dtype=dtype, device=device)
        self.b_SOR = torch.zeros(slots, out_features, rank, dtype=dtype, device=device)
        self.ranks, self.scalings = [0] * slots, [0.0] * slots
        self.ranks_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.scalings_S = torch.zeros(slots, dtype=torch.float32, device=device)

    def put(self, slot: int, a_RD: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> None:
        """Copies an adapter's weights into a slot; no batch that reads the slot may be running.

        Args:
            slot: Where to.
            a_RD: `[r, D]`, `lora_A.weight`, r at most the highest rank.
            b_OR: `[O, r]`, `lora_B.weight`.
            scaling: `lora_alpha / r`, or `lora_alpha / sqrt(r)` where it is rank-stabilised.
        """
        rank = len(a_RD)
        assert rank <= self.a_SRD.shape[1] and a_RD.shape == (rank, self.in_features)
        assert b_OR.shape == (self.out_features, rank)
        self.a_SRD[slot, :rank].copy_(a_RD)
        self.b_SOR[slot, :, :rank].copy_(b_OR)
        self.a_SRD[slot, rank:].zero_()
        self.b_SOR[slot, :, rank:].zero_()
        self._say(slot, rank, scaling)

    def clear(self, slot: int) -> None:
        """Empties a slot: rows of it stay as they are."""
        self._say(slot, 0, 0.0)

    def _say(self, slot: int, rank: int, scaling: float) -> None:
        self.ranks[slot], self.scalings[slot] = rank, scaling
        self.ranks_S[slot], self.scalings_S[slot] = rank, scaling

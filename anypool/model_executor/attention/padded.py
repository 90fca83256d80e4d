"""Attention over sequences of near lengths, padded to one length for the time of the call.

torch's fused bfloat16 attention on a CPU handles what is left of a row after its vectors element by element, and rows
are as many as queries: 40 keys cost more than 48. With lengths rounded up to a multiple of 16, neighbours of near
lengths also become one call. In float32 it does not pay, nor for the shortest texts, where the padding is too large a
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from anypool.model_executor.attention.bmm import bmm_attention, bmm_is_faster

_STEP = 16
_SHORTEST, _LONGEST = 33, 512


@dataclass(frozen=True)
class PaddedGroup:
    """Neighbouring sequences, each padded with its own first token.

    Attributes:
        rows: Where they lie in the batch.
        count, length: How many they are, and their length with padding.
        sources: `[count * length]` the row that stands at each place.
        places: The place of each of their rows.
        hidden_NS: `[count, length]` bool: the places that are padding.
    """

    rows: slice
    count: int
    length: int
    sources: torch.Tensor
    places: torch.Tensor
    hidden_NS: torch.Tensor

    def attend(
        self, q_THK: torch.Tensor, k_TGK: torch.Tensor, v_TGK: torch.Tensor, *, scale: float, causal: bool
    ) -> torch.Tensor:
        """`[rows, H, K]`."""
        q, k, v = (
            x.index_select(0, self.sources).unflatten(0, (self.count, self.length)).transpose(1, 2)
            for x in (q_THK, k_TGK, v_TGK)
        )
        # A causal query sees nothing behind itself, and padding stands last.
        hidden = None if causal else self.hidden_NS[:, None, None]
        if bmm_is_faster(q_THK, self.length):
            behind = torch.ones(self.length, self.length, dtype=torch.bool).triu_(1) if causal else hidden
            out_NHLK = bmm_attention(q, k, v, scale=scale, hidden=behind)
        else:
            mask = None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            out_NHLK = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=True
            )
        return out_NHLK.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def is_padded(length: int, window: tuple[int, int]) -> bool:
    """Whether sequences of this length are padded in a layer with this window: it must not cut into them."""
    left, right = window
    most = min(_LONGEST, left + 1 if left >= 0 else _LONGEST, right + 1 if right > 0 else _LONGEST)
    return length >= _SHORTEST and _rounded(length) <= most


def padded_groups(lengths: tuple[int, ...], window: tuple[int, int]) -> Iterator[PaddedGroup]:
    """The groups of neighbours whose rounded lengths are equal, leaving out sequences that are not padded."""
    row = 0
    for padded, neighbours in groupby(lengths, lambda n: _rounded(n) if is_padded(n, window) else 0):
        own = list(neighbours)
        if padded:
            yield _group(row, own, padded)
        row += sum(own)


def _group(row: int, lengths: list[int], padded: int) -> PaddedGroup:
    lengths_N1 = torch.tensor(lengths).unsqueeze(1)
    starts_N1 = row + lengths_N1.cumsum(0) - lengths_N1
    place_S = torch.arange(padded)
    hidden_NS = place_S >= lengths_N1
    return PaddedGroup(
        rows=slice(row, row + sum(lengths)),
        count=len(lengths),
        length=padded,
        sources=(starts_N1 + place_S.masked_fill(hidden_NS, 0)).flatten(),
        places=(~hidden_NS).flatten().nonzero().squeeze(1),
        hidden_NS=hidden_NS,
    )


def _rounded(length: int) -> int:
    return -(-length // _STEP) * _STEP

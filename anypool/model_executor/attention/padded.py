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
from anypool.model_executor.attention.masks import additive, where_hidden

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
        mask_N11S: `[count, 1, 1, length]` bfloat16, added to scores: -infinity where a place is padding, or a token
            that is not attended to.
    """

    rows: slice
    count: int
    length: int
    sources: torch.Tensor
    places: torch.Tensor
    mask_N11S: torch.Tensor

    def attend(
        self,
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        out_THK: torch.Tensor,
        *,
        scale: float,
        causal: bool,
    ) -> None:
        """Writes its rows of `[T, H, K]`."""
        q, k, v = (
            x.index_select(0, self.sources).unflatten(0, (self.count, self.length)).transpose(1, 2)
            for x in (q_THK, k_TGK, v_TGK)
        )
        # A causal query sees nothing behind itself, and padding stands last.
        if bmm_is_faster(q_THK, self.length):
            places = slice(0, self.length)
            mask = additive(places, places, (-1, 0), q.device, q.dtype) if causal else self.mask_N11S
            out_NHLK = bmm_attention(q, k, v, scale=scale, mask=mask)
        else:
            out_NHLK = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if causal else self.mask_N11S, scale=scale, is_causal=causal, enable_gqa=True
            )
        torch.index_select(out_NHLK.transpose(1, 2).flatten(0, 1), 0, self.places, out=out_THK[self.rows])


def is_padded(length: int, keys: int, window: tuple[int, int]) -> bool:
    """Whether sequences of this length are padded in a layer with this window: it must not cut into them.

    Nor are those of a causal layer with fewer keys, since there padding is hidden by standing last.
    """
    left, right = window
    if right == 0 and keys < length:
        return False
    most = min(_LONGEST, left + 1 if left >= 0 else _LONGEST, right + 1 if right > 0 else _LONGEST)
    return length >= _SHORTEST and _rounded(length) <= most


def padded_groups(lengths: tuple[int, ...], keys: tuple[int, ...], window: tuple[int, int]) -> Iterator[PaddedGroup]:
    """The groups of neighbours whose rounded lengths are equal, leaving out sequences that are not padded."""
    row = 0
    sizes = zip(lengths, keys, strict=True)
    for padded, neighbours in groupby(sizes, lambda n: _rounded(n[0]) if is_padded(n[0], n[1], window) else 0):
        own = list(neighbours)
        if padded:
            yield _group(row, own, padded)
        row += sum(length for length, _ in own)


def _group(row: int, sizes: list[tuple[int, int]], padded: int) -> PaddedGroup:
    lengths_N1, keys_N1 = torch.tensor(sizes).split(1, dim=1)
    starts_N1 = row + lengths_N1.cumsum(0) - lengths_N1
    place_S = torch.arange(padded)
    hidden_NS = place_S >= lengths_N1
    return PaddedGroup(
        rows=slice(row, row + int(lengths_N1.sum())),
        count=len(sizes),
        length=padded,
        sources=(starts_N1 + place_S.masked_fill(hidden_NS, 0)).flatten(),
        places=(~hidden_NS).flatten().nonzero().squeeze(1),
        mask_N11S=where_hidden(place_S >= keys_N1, torch.bfloat16)[:, None, None],
    )


def _rounded(length: int) -> int:
    return -(-length // _STEP) * _STEP

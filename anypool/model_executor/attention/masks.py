"""Which keys a query sees, as a mask."""

from __future__ import annotations

from functools import lru_cache

import torch

# Elements of a mask that is kept for the layers and batches that follow.
_SHARED = 256 * 1024


def visible(queries: slice, keys: slice, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[queries, keys]` bool: may the query see the key. Both are positions."""
    left, right = window
    query_L1 = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_S = torch.arange(keys.start, keys.stop, device=device)
    visible_LS = torch.ones(len(query_L1), len(key_S), dtype=torch.bool, device=device)
    if left >= 0:
        visible_LS &= key_S >= query_L1 - left
    if right >= 0:
        visible_LS &= key_S <= query_L1 + right
    return visible_LS


def additive(
    queries: slice, keys: slice, window: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The same to be added to scores: 0, or -infinity. Blocks that lie alike share it, in all layers and batches."""
    place = queries.stop - queries.start, keys.stop - keys.start, keys.start - queries.start
    make = _additive if place[0] * place[1] <= _SHARED else _additive.__wrapped__
    return make(*place, window, device, dtype)


@lru_cache(maxsize=64)
def _additive(
    queries: int, keys: int, offset: int, window: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    start = max(0, -offset)
    places = slice(start, start + queries), slice(start + offset, start + offset + keys)
    return where_hidden(~visible(*places, window, device), dtype)


def where_hidden(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-infinity where the mask is true, 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))

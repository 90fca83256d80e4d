"""Attention with plain torch: neighbouring sequences of equal length are one batched call, with no padding.

The batch is sorted by length, so neighbours are many. A layer that torch's fused attention can express runs through
it, unless the written-out form is faster. Soft-caps and sinks take that form, in blocks of queries against the keys
they can see, so that neither a window nor the upper half of a causal layer is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from anypool.model_executor.attention.bmm import bmm_attention, bmm_is_faster
from anypool.model_executor.attention.metadata import AttentionMetadata
from anypool.model_executor.attention.padded import is_padded

# Queries per block where a window or causality limits which keys are seen.
_QUERY_BLOCK = 256


def grouped_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    attn: AttentionMetadata,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    bias_HMM: torch.Tensor | None,
) -> torch.Tensor:
    """Attends within each sequence; arguments as for `Attention.__call__`."""
    assert bias_HMM is None or (window == (-1, -1) and softcap is None and sinks_H is None)
    heads, size = q_THK.shape[1], v_TGK.shape[2]
    out_THK = q_THK.new_empty(q_THK.shape[0], heads, size)
    special = softcap is not None or sinks_H is not None
    pads = not special and bias_HMM is None and q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu"
    if pads:
        for group in attn.padded_groups(window):
            out_THK[group.rows] = group.attend(q_THK, k_TGK, v_TGK, scale=scale, causal=window[1] == 0)
    for row, count, length in attn.runs:
        if pads and is_padded(length, window):
            continue
        written_out = special or (bias_HMM is None and bmm_is_faster(q_THK, length))
        rows = slice(row, row + count * length)
        q_NHLK, k_NGLK, v_NGLK = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        out_NLHK = out_THK[rows].unflatten(0, (count, length))
        for queries, keys, plain in _blocks(length, window, split_causal=written_out):
            q, k, v = q_NHLK[:, :, queries], k_NGLK[:, :, keys], v_NGLK[:, :, keys]
            if written_out:
                edge = slice(queries.start if window[0] < 0 else keys.start, keys.stop)  # all keys before it are seen
                hidden = None if plain else ~_visible(queries, edge, window, q.device)
                out = bmm_attention(q, k, v, scale=scale, hidden=hidden, softcap=softcap, sinks_H=sinks_H)
            else:
                mask = None if plain else _mask(queries, keys, window, q.device, q.dtype)
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask if bias_HMM is None else bias_HMM[:, queries, keys],
                    scale=scale,
                    is_causal=plain and window[1] == 0,
                    enable_gqa=True,
                )
            out_NLHK[:, queries] = out.transpose(1, 2)
    return out_THK


def _blocks(length: int, window: tuple[int, int], *, split_causal: bool = False) -> Iterator[tuple[slice, slice, bool]]:
    """Blocks of queries, the keys that any of them sees, and whether torch's `is_causal` or no mask says it all.

    Args:
        length: Tokens of a sequence.
        window: The layer's.
        split_causal: Whether a causal layer without a window is cut into blocks with a mask as well.
    """
    left, right = window
    everything = slice(0, length)
    all_seen = (left < 0 or left >= length - 1) and (right <= 0 or right >= length - 1)
    if all_seen and not (split_causal and right == 0):
        yield everything, everything, True
        return
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(length, start + _QUERY_BLOCK)
        lowest = 0 if left < 0 else max(0, start - left)
        highest = length if right < 0 else min(length, stop + right)
        yield slice(start, stop), slice(lowest, highest), False


def _visible(queries: slice, keys: slice, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[queries, keys]` bool: may the query see the key. Blocks that lie alike share it."""
    return _visible_at(*_place(queries, keys), window, device)


def _mask(
    queries: slice, keys: slice, window: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The same as torch's fused attention takes it: on a CPU to be added, or it would make that in every call."""
    place = _place(queries, keys)
    return _visible_at(*place, window, device) if device.type != "cpu" else _additive_at(*place, window, dtype)


def _place(queries: slice, keys: slice) -> tuple[int, int, int]:
    """Queries, keys, and how far the first key is ahead of the first query."""
    return queries.stop - queries.start, keys.stop - keys.start, keys.start - queries.start


@lru_cache(maxsize=64)
def _visible_at(queries: int, keys: int, offset: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    left, right = window
    ahead = offset + torch.arange(keys, device=device) - torch.arange(queries, device=device).unsqueeze(1)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


@lru_cache(maxsize=64)
def _additive_at(queries: int, keys: int, offset: int, window: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    visible = _visible_at(queries, keys, offset, window, torch.device("cpu"))
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))

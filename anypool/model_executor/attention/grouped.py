"""Attention with plain torch: neighbouring sequences of equal length are one batched call, with no padding.

The batch is sorted by length, so neighbours are many. A layer that torch's fused attention can express runs through
it. Soft-caps and sinks take the written-out form, in blocks of queries against the keys they can see, so that neither
a window nor the upper half of a causal layer is computed for nothing, and scores stay below a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from anypool.model_executor.attention.metadata import AttentionMetadata
from anypool.model_executor.attention.padded import is_padded

# Scores that exist at one time, in elements. 4 Mi fp32 scores are 16 MiB: near the size of a last-level cache.
_SCORES = 4 * 1024 * 1024
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
    written_out = softcap is not None or sinks_H is not None
    pads = not written_out and bias_HMM is None and q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu"
    if pads:
        for group in attn.padded_groups(window):
            out_THK[group.rows] = group.attend(q_THK, k_TGK, v_TGK, scale=scale, causal=window[1] == 0)
    for row, count, length in attn.runs:
        if pads and is_padded(length, window):
            continue
        step = max(1, _SCORES // (heads * length * min(length, _QUERY_BLOCK))) if written_out else count
        for first in range(0, count, step):
            n = min(step, count - first)
            rows = slice(row + first * length, row + (first + n) * length)
            q_NHLK, k_NGLK, v_NGLK = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
            out_NLHK = out_THK[rows].unflatten(0, (n, length))
            for queries, keys, plain in _blocks(length, window):
                q, k, v = q_NHLK[:, :, queries], k_NGLK[:, :, keys], v_NGLK[:, :, keys]
                if written_out:
                    visible = _visible(queries, keys, window, q.device)
                    out = _written_out(q, k, v, visible, scale, softcap, sinks_H)
                else:
                    mask = None if plain else _visible(queries, keys, window, q.device)
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


def _blocks(length: int, window: tuple[int, int]) -> Iterator[tuple[slice, slice, bool]]:
    """Blocks of queries, the keys that any of them sees, and whether torch's `is_causal` or no mask says it all."""
    left, right = window
    everything = slice(0, length)
    if (left < 0 or left >= length - 1) and (right <= 0 or right >= length - 1):
        yield everything, everything, True
        return
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(length, start + _QUERY_BLOCK)
        lowest = 0 if left < 0 else max(0, start - left)
        highest = length if right < 0 else min(length, stop + right)
        yield slice(start, stop), slice(lowest, highest), False


def _visible(queries: slice, keys: slice, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[queries, keys]` bool: may the query see the key."""
    left, right = window
    ahead = torch.arange(keys.start, keys.stop, device=device) - torch.arange(
        queries.start, queries.stop, device=device
    ).unsqueeze(1)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def _written_out(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSK: torch.Tensor,
    visible_LS: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Scores, soft-cap, float32 softmax with sinks, product with the values. Key heads are not copied."""
    n, heads, queries, size = q_NHLK.shape
    groups = k_NGSK.shape[1]
    q = (q_NHLK * scale).reshape(n, groups, heads // groups * queries, size)
    scores = (q @ k_NGSK.transpose(-1, -2)).float().view(n, heads, queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~visible_LS, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, heads, 1, 1).expand(n, -1, queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = scores.softmax(dim=-1)[..., : v_NGSK.shape[2]].to(v_NGSK.dtype)
    out = probs.reshape(n, groups, heads // groups * queries, -1) @ v_NGSK
    return out.view(n, heads, queries, -1)

"""Attention with plain torch: neighbouring sequences of equal length are one batched call, with no padding.

The batch is sorted by length, so neighbours are many. A layer that torch's fused attention can express runs through
it. Soft-caps and sinks take the written-out form, in blocks of queries against the keys they can see, so that neither
a window nor the upper half of a causal layer is computed for nothing, and scores stay below a fixed size. Queries
behind a prefix of cached keys go in such blocks too: torch's `is_causal` begins at the first key, not at theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anypool.model_executor.attention.metadata import AttentionMetadata, Run
from anypool.model_executor.attention.padded import is_padded
from anypool.model_executor.attention.prefix import PrefixKeys

# Scores that exist at one time, in elements. 4 Mi fp32 scores are 16 MiB: near the size of a last-level cache.
_SCORES = 4 * 1024 * 1024
# Queries per block where a window or causality limits which keys are seen.
_QUERY_BLOCK = 256
_LEAST_QUERY_BLOCK = 16
# Elements of the keys of a prefix, with those behind it, that are copied together at one time.
_KEYS = 4 * 1024 * 1024


class _Scoring(NamedTuple):
    """What `Attention` says about scores."""

    scale: float
    window: tuple[int, int]
    softcap: float | None
    sinks_H: torch.Tensor | None
    bias_HMM: torch.Tensor | None

    @property
    def written_out(self) -> bool:
        """Whether torch's fused attention cannot express it."""
        return self.softcap is not None or self.sinks_H is not None


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
    """Attends within each sequence and to its prefix; arguments as for `Attention.__call__`."""
    assert bias_HMM is None or (window == (-1, -1) and softcap is None and sinks_H is None)
    layer = None
    if attn.prefix is not None:
        assert window[1] == 0 and bias_HMM is None, "only causal layers know the keys of a prefix before its queries"
        layer = attn.prefix.store_own(k_TGK, v_TGK)
    scoring = _Scoring(scale, window, softcap, sinks_H, bias_HMM)
    out_THK = q_THK.new_empty(*q_THK.shape[:2], v_TGK.shape[2])
    pads = _pads(attn, scoring, q_THK)
    if pads:
        for group in attn.padded_groups(window):
            out_THK[group.rows] = group.attend(q_THK, k_TGK, v_TGK, scale=scale, causal=window[1] == 0)
    for run in _parts(attn, scoring, q_THK.shape[1], k_TGK[0].numel()):
        if pads and is_padded(run.length, window):
            continue
        n, length = run.sequences, run.length
        rows = slice(run.row, run.row + n * length)
        q_NHLK, k_NGSK, v_NGSK = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        origin = 0
        if run.before > 0:
            assert attn.prefix is not None and layer is not None
            k_NGSK, v_NGSK, origin = _after_prefix(k_NGSK, v_NGSK, attn.prefix, layer, run, window[0])
        out_NLHK = out_THK[rows].unflatten(0, (n, length))
        for queries, keys, plain in _blocks(run, scoring, q_THK.shape[1]):
            own, seen = _shifted(queries, run.before), _shifted(keys, origin)
            q, k, v = q_NHLK[:, :, own], k_NGSK[:, :, seen], v_NGSK[:, :, seen]
            out_NLHK[:, own] = _attend(q, k, v, queries, keys, plain, scoring).transpose(1, 2)
    return out_THK


def _pads(attn: AttentionMetadata, scoring: _Scoring, q_THK: torch.Tensor) -> bool:
    """Whether near lengths are padded to one."""
    is_fused = not scoring.written_out and scoring.bias_HMM is None
    has_prefix = attn.prefix is not None and any(attn.prefix.lengths)
    return is_fused and not has_prefix and q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu"


def _attend(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSV: torch.Tensor,
    queries: slice,
    keys: slice,
    plain: bool,
    scoring: _Scoring,
) -> torch.Tensor:
    """`[N, H, L, V]` of the queries and keys at these positions."""
    if scoring.written_out:
        return _written_out(q_NHLK, k_NGSK, v_NGSV, _visible(queries, keys, scoring.window, q_NHLK.device), scoring)
    mask = None if plain else _visible(queries, keys, scoring.window, q_NHLK.device)
    return F.scaled_dot_product_attention(
        q_NHLK,
        k_NGSK,
        v_NGSV,
        attn_mask=mask if scoring.bias_HMM is None else scoring.bias_HMM[:, queries, keys],
        scale=scoring.scale,
        is_causal=plain and scoring.window[1] == 0 and queries.start == 0,
        enable_gqa=True,
    )


def _parts(attn: AttentionMetadata, scoring: _Scoring, heads: int, key_size: int) -> Iterator[Run]:
    """The runs, in parts of as many sequences as are computed at one time."""
    for run in attn.runs:
        step, keys = run.sequences, run.before + run.length
        if scoring.written_out:
            step = min(step, _SCORES // (heads * keys * min(run.length, _query_block(run, scoring, heads))))
        if run.before > 0:
            step = min(step, _KEYS // (keys * key_size))
        step = max(step, 1)
        for done in range(0, run.sequences, step):
            n = min(step, run.sequences - done)
            yield run._replace(row=run.row + done * run.length, first=run.first + done, sequences=n)


def _query_block(run: Run, scoring: _Scoring, heads: int) -> int:
    """Queries per block: fewer where scores against a long prefix are written out."""
    if run.before == 0 or not scoring.written_out:
        return _QUERY_BLOCK
    return min(_QUERY_BLOCK, max(_LEAST_QUERY_BLOCK, _SCORES // (heads * (run.before + run.length))))


def _after_prefix(
    k_NGLK: torch.Tensor, v_NGLV: torch.Tensor, prefix: PrefixKeys, layer: int, run: Run, left: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A run's keys and values behind those of its prefix, from the first block that any of its queries sees.

    Returns:
        Keys, values, and the position of the first of them.
    """
    size = prefix.store.block_size
    lowest = 0 if left < 0 else max(0, run.before - left)
    blocks = slice(lowest // size, -(-run.before // size))
    origin, cached = blocks.start * size, (blocks.stop - blocks.start) * size
    own = run.before - origin  # whole blocks are read, so up to here: what the last block holds beyond is overwritten
    k_NSGK, v_NSGV = (
        x.new_empty(x.shape[0], max(cached, own + run.length), x.shape[1], x.shape[3]) for x in (k_NGLK, v_NGLV)
    )
    for i in range(run.sequences):
        table = prefix.block_tables[run.first + i][blocks]
        prefix.store.read_blocks(layer, table, k_NSGK[i, :cached], v_NSGV[i, :cached])
    end = own + run.length
    k_NSGK[:, own:end], v_NSGV[:, own:end] = k_NGLK.transpose(1, 2), v_NGLV.transpose(1, 2)
    return k_NSGK[:, :end].transpose(1, 2), v_NSGV[:, :end].transpose(1, 2), origin


def _shifted(positions: slice, by: int) -> slice:
    return slice(positions.start - by, positions.stop - by)


def _blocks(run: Run, scoring: _Scoring, heads: int) -> Iterator[tuple[slice, slice, bool]]:
    """Blocks of queries, the keys that any of them sees, and whether torch's `is_causal` or no mask says it all.

    Both are positions: the first query's is `run.before`.
    """
    left, right = scoring.window
    end = run.before + run.length
    if run.before == 0 and (left < 0 or left >= end - 1) and (right <= 0 or right >= end - 1):
        yield slice(0, end), slice(0, end), True
        return
    block = _query_block(run, scoring, heads)
    for start in range(run.before, end, block):
        stop = min(end, start + block)
        lowest = 0 if left < 0 else max(0, start - left)
        highest = end if right < 0 else min(end, stop + right)
        yield slice(start, stop), slice(lowest, highest), run.before > 0 and stop - start == 1


def _visible(queries: slice, keys: slice, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[queries, keys]` bool: may the query see the key."""
    left, right = window
    query_L1 = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_S = torch.arange(keys.start, keys.stop, device=device)
    visible_LS = torch.ones(len(query_L1), len(key_S), dtype=torch.bool, device=device)
    if left >= 0:
        visible_LS &= key_S >= query_L1 - left
    if right >= 0:
        visible_LS &= key_S <= query_L1 + right
    return visible_LS


def _written_out(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSK: torch.Tensor,
    visible_LS: torch.Tensor,
    scoring: _Scoring,
) -> torch.Tensor:
    """Scores, soft-cap, float32 softmax with sinks, product with the values. Key heads are not copied."""
    n, heads, queries, size = q_NHLK.shape
    groups = k_NGSK.shape[1]
    q = (q_NHLK * scoring.scale).reshape(n, groups, heads // groups * queries, size)
    scores = (q @ k_NGSK.transpose(-1, -2)).float().view(n, heads, queries, -1)
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh_().mul_(scoring.softcap)
    scores.masked_fill_(~visible_LS, float("-inf"))
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.float().view(1, heads, 1, 1).expand(n, -1, queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = scores.softmax(dim=-1)[..., : v_NGSK.shape[2]].to(v_NGSK.dtype)
    out = probs.reshape(n, groups, heads // groups * queries, -1) @ v_NGSK
    return out.view(n, heads, queries, -1)

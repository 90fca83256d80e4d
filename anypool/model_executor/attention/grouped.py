"""Attention with plain torch: neighbouring sequences of equal length are one batched call, with no padding.

The batch is sorted by length, so neighbours are many. A layer that torch's fused attention can express runs through
it, unless the written-out form is faster. Soft-caps and sinks take that form, in blocks of queries against the keys
they can see, so that neither a window nor the upper half of a causal layer is computed for nothing. Queries behind a
prefix of cached keys go in such blocks too: torch's `is_causal` begins at the first key, not at theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anypool.model_executor.attention.bmm import SCORES, bmm_attention, bmm_is_faster
from anypool.model_executor.attention.masks import additive, visible
from anypool.model_executor.attention.metadata import AttentionMetadata, Run
from anypool.model_executor.attention.padded import is_padded
from anypool.model_executor.attention.prefix import PrefixKeys

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
    def is_special(self) -> bool:
        """Whether torch's fused attention cannot express it."""
        return self.softcap is not None or self.sinks_H is not None

    def is_written_out(self, q_THK: torch.Tensor, length: int) -> bool:
        """Whether sequences of a length are not left to torch's fused attention."""
        return self.is_special or (self.bias_HMM is None and bmm_is_faster(q_THK, length))


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
            group.attend(q_THK, k_TGK, v_TGK, out_THK, scale=scale, causal=window[1] == 0)
    for part in _parts(attn, scoring, q_THK, k_TGK, pads=pads):
        run = part.run
        q_NHLK, k_NGSK, v_NGSK, out_NHLK = (part.of(x) for x in (q_THK, k_TGK, v_TGK, out_THK))
        attend = _written_out if part.is_written_out else _fused
        if part.is_one_block:
            [(queries, keys, plain)] = part.blocks
            attend(q_NHLK, k_NGSK, v_NGSK, out_NHLK, queries, keys, plain, scoring)
            continue
        origin = 0
        if run.before > 0:
            assert attn.prefix is not None and layer is not None
            k_NGSK, v_NGSK, origin = _after_prefix(k_NGSK, v_NGSK, attn.prefix, layer, run, window[0])
        if run.keys < run.length:
            out_NHLK[:, :, _seeing(run, window) - run.before :].zero_()
        for queries, keys, plain in part.blocks:
            own, seen = _shifted(queries, run.before), _shifted(keys, origin)
            q, k, v, out = q_NHLK[:, :, own], k_NGSK[:, :, seen], v_NGSK[:, :, seen], out_NHLK[:, :, own]
            attend(q, k, v, out, queries, keys, plain, scoring)
    return out_THK


class _Part(NamedTuple):
    """Sequences of a run whose attention is one call per block of queries.

    Attributes:
        run: What is computed of it.
        rows: Where it lies; None for the whole batch.
        is_written_out: Whether it is not left to torch's fused attention.
        blocks: As from `_blocks`.
        is_one_block: Whether there is one, of all queries and keys, without a prefix.
    """

    run: Run
    rows: slice | None
    is_written_out: bool
    blocks: tuple[tuple[slice, slice, bool], ...]
    is_one_block: bool

    def of(self, x_THK: torch.Tensor) -> torch.Tensor:
        """`[N, H, L, K]`: its sequences, side by side."""
        mine = x_THK if self.rows is None else x_THK[self.rows]
        return mine.view(self.run.sequences, self.run.length, *mine.shape[1:]).transpose(1, 2)


def _parts(
    attn: AttentionMetadata, scoring: _Scoring, q_THK: torch.Tensor, k_TGK: torch.Tensor, *, pads: bool
) -> tuple[_Part, ...]:
    """What is left to compute beside padded groups, worked out once for layers that are alike."""
    heads, key_size = q_THK.shape[1], k_TGK.shape[1] * k_TGK.shape[2]
    is_biased = scoring.bias_HMM is not None
    key = ("parts", scoring.window, heads, key_size, q_THK.dtype, scoring.is_special, is_biased, pads)
    if key not in attn.plans:
        runs = (run for run in _runs(attn, key_size) if not (pads and is_padded(run.length, run.keys, scoring.window)))
        attn.plans[key] = tuple(_part(run, scoring, q_THK) for run in runs)
    parts: tuple[_Part, ...] = attn.plans[key]
    return parts


def _part(run: Run, scoring: _Scoring, q_THK: torch.Tensor) -> _Part:
    is_written_out = scoring.is_written_out(q_THK, run.length)
    blocks = tuple(_blocks(run, scoring.window, q_THK.shape[1], written_out=is_written_out))
    rows = slice(run.row, run.row + run.sequences * run.length)
    everything = slice(0, run.length)
    is_one_block = run.before == 0 and len(blocks) == 1 and blocks[0][:2] == (everything, everything)
    return _Part(run, None if rows == slice(0, q_THK.shape[0]) else rows, is_written_out, blocks, is_one_block)


def _pads(attn: AttentionMetadata, scoring: _Scoring, q_THK: torch.Tensor) -> bool:
    """Whether near lengths are padded to one."""
    is_fused = not scoring.is_special and scoring.bias_HMM is None
    has_prefix = attn.prefix is not None and any(attn.prefix.lengths)
    return is_fused and not has_prefix and q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu"


def _fused(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSV: torch.Tensor,
    out_NHLV: torch.Tensor,
    queries: slice,
    keys: slice,
    plain: bool,
    scoring: _Scoring,
) -> None:
    """Writes the output of the queries and keys at these positions."""
    mask = None
    if not plain:
        # On a CPU torch would make an additive mask of a bool one in every call.
        masking = (queries, keys, scoring.window, q_NHLK.device)
        mask = additive(*masking, q_NHLK.dtype) if q_NHLK.device.type == "cpu" else visible(*masking)
    attended_NHLV = F.scaled_dot_product_attention(
        q_NHLK,
        k_NGSK,
        v_NGSV,
        attn_mask=mask if scoring.bias_HMM is None else scoring.bias_HMM[:, queries, keys],
        scale=scoring.scale,
        is_causal=plain and scoring.window[1] == 0 and queries.start == 0,
        enable_gqa=True,
    )
    out_NHLV.copy_(attended_NHLV)


def _written_out(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSV: torch.Tensor,
    out_NHLV: torch.Tensor,
    queries: slice,
    keys: slice,
    plain: bool,
    scoring: _Scoring,
) -> None:
    """The same as `_fused`."""
    # Without a limit on the left, all keys before the first query are seen.
    edge = slice(max(queries.start, keys.start) if scoring.window[0] < 0 else keys.start, keys.stop)
    bmm_attention(
        q_NHLK,
        k_NGSK,
        v_NGSV,
        scale=scoring.scale,
        mask=None if plain else additive(queries, edge, scoring.window, q_NHLK.device, q_NHLK.dtype),
        softcap=scoring.softcap,
        sinks_H=scoring.sinks_H,
        out_NHLK=out_NHLV,
    )


def _runs(attn: AttentionMetadata, key_size: int) -> Iterator[Run]:
    """The runs, in parts of as many sequences as have the keys of their prefixes copied at one time."""
    for run in attn.runs:
        step = run.sequences if run.before == 0 else max(1, _KEYS // ((run.before + run.length) * key_size))
        for done in range(0, run.sequences, step):
            n = min(step, run.sequences - done)
            yield run._replace(row=run.row + done * run.length, first=run.first + done, sequences=n)


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


def _blocks(run: Run, window: tuple[int, int], heads: int, *, written_out: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Blocks of queries, the keys that any of them sees, and whether torch's `is_causal` or no mask says it all.

    Both are positions: the first query's is `run.before`. Written out, a causal layer is cut into blocks as well.
    """
    left, right = window
    end, last = _seeing(run, window), run.before + run.keys
    all_seen = (left < 0 or left >= end - 1) and (right <= 0 or right >= end - 1)
    if run.before == 0 and all_seen and not (right == 0 and (written_out or last < end)):
        yield slice(0, end), slice(0, last), True
        return
    block = _QUERY_BLOCK
    if run.before > 0 and written_out:  # scores against a long prefix are many
        block = min(block, max(_LEAST_QUERY_BLOCK, SCORES // (heads * end)))
    elif run.before > 0 and left < 0:  # the fused form holds few of them, and most queries see most keys
        block = 2 * block
    for start in range(run.before, end, block):
        stop = min(end, start + block)
        lowest = 0 if left < 0 else max(0, start - left)
        highest = last if right < 0 else min(last, stop + right)
        is_alone = run.before > 0 and run.keys == run.length and stop - start == 1
        is_behind = (
            left < 0 and start > 0 and last <= start + 1
        )  # all that is seen lies before the first query, or is it
        yield slice(start, stop), slice(lowest, highest), is_alone or is_behind


def _seeing(run: Run, window: tuple[int, int]) -> int:
    """The position up to which queries see a key. Those behind it, further from the last key than the window, get 0."""
    end = run.before + run.length
    return end if window[0] < 0 else min(end, run.before + run.keys + window[0])

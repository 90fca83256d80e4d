"""Attention written out: product, float32 softmax, product. It expresses soft-caps and sinks, and in bfloat16 on some
CPUs it is the fast one."""

from __future__ import annotations

import math
import os
from functools import cache

import torch

from anypool.errors import ConfigError

CPU_ATTENTION = "ANYPOOL_CPU_ATTENTION"
# Scores that exist at one time, in elements. 4 Mi fp32 scores are 16 MiB: near the size of a last-level cache.
SCORES = 4 * 1024 * 1024
# Below this length the products are too small to make up for the copies.
_SHORTEST = 8


def bmm_is_faster(q_THK: torch.Tensor, length: int) -> bool:
    """Whether sequences of a length are faster written out than through torch's fused attention.

    Measured for bfloat16: 2 to 4 times faster on AMD Zen 5, and 1.5 times slower on Intel Sapphire Rapids, whose AMX
    tiles torch's fused attention uses. In float32 the two are about equal.
    """
    return q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu" and length >= _SHORTEST and _cpu_prefers_bmm()


def _cpu_prefers_bmm() -> bool:
    """What `ANYPOOL_CPU_ATTENTION` says, auto, fused or bmm; auto is by the CPU's instructions."""
    way = os.environ.get(CPU_ATTENTION, "auto")
    if way not in ("auto", "fused", "bmm"):
        raise ConfigError(f"{CPU_ATTENTION}={way!r} is unknown; known: auto, fused, bmm")
    return way == "bmm" or (way == "auto" and _multiplies_bfloat16_without_tiles())


@cache
def _multiplies_bfloat16_without_tiles() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported()) and not torch.cpu._is_amx_tile_supported()


def bmm_attention(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSK: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    out_NHLK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a block of queries to a block of keys. Key heads are not copied for the heads that share them.

    Args:
        q_NHLK: Queries.
        k_NGSK: Keys, G dividing H.
        v_NGSK: Values.
        scale: Factor on the scores.
        mask: Added to the scores, -infinity where a query does not see a key: `[L, R]` or `[N, 1, 1, R]`, about the
            last R keys.
        softcap: c in c tanh(score / c), or None.
        sinks_H: `[H]` scores that take part in the softmax without a value, or None.
        out_NHLK: Where to write the result, of any strides; None for a tensor that is contiguous as `[N, L, H, K]`.

    Returns:
        `[N, H, L, K]`.
    """
    n, heads, queries, _ = q_NHLK.shape
    if out_NHLK is None:
        out_NHLK = q_NHLK.new_empty(n, queries, heads, v_NGSK.shape[-1]).transpose(1, 2)
    is_plain = softcap is None and sinks_H is None and q_NHLK.dtype == torch.bfloat16
    step = max(1, SCORES // (heads * queries * k_NGSK.shape[2]))
    for first in range(0, n, step):
        parts = (q_NHLK, k_NGSK, v_NGSK, out_NHLK)
        q, k, v, out = parts if step >= n else (x[first : first + step] for x in parts)
        own = mask if mask is None or mask.dim() == 2 else mask[first : first + step]
        if not (is_plain and _attend_without_maximum(q, k, v, own, scale, out)):
            out.copy_(_values(_softmax(_scores(q, k, own, scale, softcap), sinks_H), v))
    return out_NHLK


# Sums between these are far from bfloat16's ends, 2^-126 and 2^127, and no term is larger than its sum.
_SMALLEST_SUM, _LARGEST_SUM = 2.0**-100, 2.0**100


def _attend_without_maximum(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    v_NGSK: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    out_NHLK: torch.Tensor,
) -> bool:
    """Attention by powers of two of the scores as they are, divided by their sums at the end.

    softmax(x) is 2^y / sum 2^y with y = x log2(e). A softmax first subtracts the largest score, so that nothing
    overflows; where nothing would, that is a pass over the scores saved, and the division is one over the smaller
    result. In bfloat16 it has the same accuracy, in less than half the time.

    Returns:
        Whether `out_NHLK` was written; if not, a sum is too large, too small or not a number.
    """
    powers_NHLS = _scores(q_NHLK, k_NGSK, mask, scale * math.log2(math.e)).exp2_()
    sums_NHL1 = powers_NHLS.sum(-1, keepdim=True)
    smallest, largest = sums_NHL1.aminmax()
    if not (smallest >= _SMALLEST_SUM and largest <= _LARGEST_SUM):
        return False
    torch.div(_values(powers_NHLS, v_NGSK), sums_NHL1, out=out_NHLK)
    return True


def _scores(
    q_NHLK: torch.Tensor,
    k_NGSK: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    n, heads, queries, size = q_NHLK.shape
    groups, keys = k_NGSK.shape[1:3]
    q = q_NHLK.reshape(n * groups, heads // groups * queries, size)
    k = k_NGSK.reshape(n * groups, keys, size).transpose(1, 2)
    # The factor inside the product rounds less, and is one pass less, than one on the queries or the scores.
    if softcap is None and mask is not None and mask.dim() == 4 and mask.shape[-1] == keys:
        # So is the mask.
        start = mask.expand(n, groups, 1, keys).reshape(n * groups, 1, keys)
        return torch.baddbmm(start, q, k, alpha=scale).view(n, heads, queries, keys)
    scores_NHLS = torch.baddbmm(_nothing(q.dtype, q.device), q, k, beta=0, alpha=scale).view(n, heads, queries, keys)
    if softcap is not None:
        scores_NHLS = (scores_NHLS.float() / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores_NHLS[..., -mask.shape[-1] :].add_(mask)
    return scores_NHLS


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, 1, 1, dtype=dtype, device=device)


def _softmax(scores_NHLS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is None:
        return scores_NHLS.softmax(dim=-1)  # in float32 inside, whatever the dtype
    n, heads, queries, keys = scores_NHLS.shape
    sinks = sinks_H.float().view(1, heads, 1, 1).expand(n, -1, queries, 1)
    return torch.cat([scores_NHLS.float(), sinks], dim=-1).softmax(dim=-1)[..., :keys]


def _values(probs_NHLS: torch.Tensor, v_NGSK: torch.Tensor) -> torch.Tensor:
    n, heads, queries, keys = probs_NHLS.shape
    groups, _, size = v_NGSK.shape[1:]
    probs = probs_NHLS.to(v_NGSK.dtype).reshape(n * groups, heads // groups * queries, keys)
    return torch.bmm(probs, v_NGSK.reshape(n * groups, keys, size)).view(n, heads, queries, size)

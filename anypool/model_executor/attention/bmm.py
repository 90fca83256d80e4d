"""Attention written out: product, float32 softmax, product. It expresses soft-caps and sinks, and in bfloat16 on some
CPUs it is the fast one."""

from __future__ import annotations

import os
from functools import cache

import torch

from anypool.errors import ConfigError

CPU_ATTENTION = "ANYPOOL_CPU_ATTENTION"
# Scores that exist at one time, in elements. 4 Mi fp32 scores are 16 MiB: near the size of a last-level cache.
SCORES = 4 * 1024 * 1024
# Below this length the products are too small to make up for the copies.
_SHORTEST = 32


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
    hidden: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a block of queries to a block of keys. Key heads are not copied for the heads that share them.

    Args:
        q_NHLK: Queries.
        k_NGSK: Keys, G dividing H.
        v_NGSK: Values.
        scale: Factor on the scores.
        hidden: Bool, where a query does not see a key: `[L, R]` or `[N, 1, 1, R]`, about the last R keys.
        softcap: c in c tanh(score / c), or None.
        sinks_H: `[H]` scores that take part in the softmax without a value, or None.

    Returns:
        `[N, H, L, K]`, contiguous as `[N, L, H, K]`.
    """
    n, heads, queries, _ = q_NHLK.shape
    out_NLHK = q_NHLK.new_empty(n, queries, heads, v_NGSK.shape[-1])
    step = max(1, SCORES // (heads * queries * k_NGSK.shape[2]))
    for first in range(0, n, step):
        some = slice(first, first + step)
        scores_NHLS = _scores(q_NHLK[some], k_NGSK[some], scale)
        if softcap is not None:
            scores_NHLS = (scores_NHLS.float() / softcap).tanh_().mul_(softcap)
        if hidden is not None:
            last = scores_NHLS[..., -hidden.shape[-1] :]
            last.masked_fill_(hidden if hidden.dim() == 2 else hidden[some], float("-inf"))
        out_NLHK[some] = _values(_softmax(scores_NHLS, sinks_H), v_NGSK[some]).transpose(1, 2)
    return out_NLHK.transpose(1, 2)


def _scores(q_NHLK: torch.Tensor, k_NGSK: torch.Tensor, scale: float) -> torch.Tensor:
    n, heads, queries, size = q_NHLK.shape
    groups, keys = k_NGSK.shape[1:3]
    q = q_NHLK.reshape(n * groups, heads // groups * queries, size)
    k = k_NGSK.reshape(n * groups, keys, size).transpose(1, 2)
    # The factor inside the product rounds less, and is one pass less, than one on the queries or the scores.
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, k, beta=0, alpha=scale).view(n, heads, queries, keys)


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

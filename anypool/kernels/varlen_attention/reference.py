"""Packed attention written to be read: one sequence at a time, the whole score matrix, float32 softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def varlen_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(q k^T scale)) v within each sequence.

    Args:
        q_THK: `[T, H, K]` queries.
        k_TGK: `[T, G, K]` keys; G divides H, each key head serves H/G consecutive query heads.
        v_TGK: `[T, G, K]` values.
        lengths: Tokens per sequence; they sum to T.
        scale: Factor on the scores.
        window: How many keys before and after its own position a query sees; -1 is no limit, so
            (-1, 0) is causal and (-1, -1) bidirectional.
        softcap: c in c tanh(score / c), as in Gemma 2 (arXiv:2408.00118, section 2).
        sinks_H: `[H]` one extra score per head that takes part in the softmax and has no value, as in gpt-oss.

    Returns:
        `[T, H, K]` in the dtype of `q_THK`.
    """
    out_THK = torch.empty_like(q_THK)
    groups = q_THK.shape[1] // k_TGK.shape[1]
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        q_HLK = q_THK[rows].transpose(0, 1).float()
        k_HLK = k_TGK[rows].transpose(0, 1).float().repeat_interleave(groups, dim=0)
        v_HLK = v_TGK[rows].transpose(0, 1).float().repeat_interleave(groups, dim=0)
        scores_HLL = q_HLK @ k_HLK.transpose(1, 2) * scale
        if softcap is not None:
            scores_HLL = softcap * torch.tanh(scores_HLL / softcap)
        scores_HLL = scores_HLL.masked_fill(~_visible(length, window, q_THK.device), float("-inf"))
        if sinks_H is not None:
            sinks_HL1 = sinks_H.float()[:, None, None].expand(-1, length, 1)
            scores_HLL = torch.cat([scores_HLL, sinks_HL1], dim=-1)
        probs_HLL = scores_HLL.softmax(dim=-1)[..., :length]
        out_THK[rows] = (probs_HLL @ v_HLK).transpose(0, 1).to(out_THK.dtype)
        start += length
    return out_THK


def _visible(length: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[L, L]` bool: may query i see key j."""
    position = torch.arange(length, device=device)
    ahead_LL = position[None, :] - position[:, None]
    left, right = window
    visible_LL = torch.ones(length, length, dtype=torch.bool, device=device)
    if left >= 0:
        visible_LL &= ahead_LL >= -left
    if right >= 0:
        visible_LL &= ahead_LL <= right
    return visible_LL

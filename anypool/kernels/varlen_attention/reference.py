"""Packed attention written to be read: one sequence at a time, the whole score matrix, float32 softmax."""

from __future__ import annotations

from itertools import pairwise

import torch

from anypool.kernels.varlen_attention.paged import PagedKeys


def varlen_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGV: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    prefix: PagedKeys | None = None,
    key_lengths_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[T, H, V]` in the dtype of `q_THK`; arguments as for the public function."""
    out_THV = q_THK.new_empty(*q_THK.shape[:2], v_TGV.shape[2])
    share = q_THK.shape[1] // k_TGK.shape[1]
    bounds = cu_seqlens.tolist()
    for i, (start, stop) in enumerate(pairwise(bounds)):
        q_LHK, k_SGK, v_SGV = (x[start:stop] for x in (q_THK, k_TGK, v_TGV))
        if prefix is not None:
            before_k, before_v = prefix.of(i)
            k_SGK, v_SGV = torch.cat([before_k, k_SGK]), torch.cat([before_v, v_SGV])
        q_HLK = q_LHK.transpose(0, 1).float()
        k_HSK, v_HSV = (x.transpose(0, 1).float().repeat_interleave(share, dim=0) for x in (k_SGK, v_SGV))
        scores_HLS = q_HLK @ k_HSK.transpose(1, 2) * scale
        if softcap is not None:
            scores_HLS = softcap * torch.tanh(scores_HLS / softcap)
        visible_LS = _visible(stop - start, len(k_SGK), window, q_THK.device)
        if key_lengths_N is not None:
            visible_LS[:, len(k_SGK) - (stop - start) + int(key_lengths_N[i]) :] = False
        scores_HLS = scores_HLS.masked_fill(~visible_LS, float("-inf"))
        if sinks_H is not None:
            sinks_HL1 = sinks_H.float()[:, None, None].expand(-1, stop - start, 1)
            scores_HLS = torch.cat([scores_HLS, sinks_HL1], dim=-1)
        probs_HLS = scores_HLS.softmax(dim=-1)[..., : len(k_SGK)]
        probs_HLS = probs_HLS.masked_fill(~visible_LS.any(dim=1, keepdim=True), 0.0)
        out_THV[start:stop] = (probs_HLS @ v_HSV).transpose(0, 1).to(out_THV.dtype)
    return out_THV


def _visible(queries: int, keys: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`[L, S]` bool: may query i see key j. The queries stand at the last positions."""
    query_L1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    ahead_LS = torch.arange(keys, device=device) - query_L1
    left, right = window
    visible_LS = torch.ones_like(ahead_LS, dtype=torch.bool)
    if left >= 0:
        visible_LS &= ahead_LS >= -left
    if right >= 0:
        visible_LS &= ahead_LS <= right
    return visible_LS

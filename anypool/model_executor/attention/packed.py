"""Attention of a whole packed batch in one call: torch's own, and our kernel."""

from __future__ import annotations

from typing import Any

import torch

from anypool.kernels.varlen_attention import PagedKeys, varlen_attention
from anypool.model_executor.attention.metadata import AttentionMetadata


def torch_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    attn: AttentionMetadata,
    *,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """`[T, H, K]`. A sequence's numbers do not depend on its batch: the keys of one are never split up."""
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    bounds, longest = attn.cu_seqlens, attn.max_length
    if attn.prefix is not None:
        attn.prefix.store_own(k_TGK, v_TGK)
    out_THK: torch.Tensor = attend(
        *(q_THK, k_TGK, v_TGK, bounds, bounds, longest, longest),
        scale=scale,
        window_size=window,
        enable_gqa=q_THK.shape[1] != k_TGK.shape[1],
        num_splits=1,
    )
    return out_THK


def kernel_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGV: torch.Tensor,
    attn: AttentionMetadata,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """`[T, H, V]`; arguments as for `Attention.__call__`."""
    paged = None
    if attn.prefix is not None:
        assert window[1] == 0, "only causal layers know the keys of a prefix before its queries"
        layer = attn.prefix.store_own(k_TGK, v_TGV)
        if any(attn.prefix.lengths):
            store = attn.prefix.store
            keys, values = store.slots(layer)
            paged = PagedKeys(keys, values, attn.prefix.tables_NB, attn.prefix.lengths_N, store.block_size)
    return varlen_attention(
        q_THK,
        k_TGK,
        v_TGV,
        attn.cu_seqlens,
        attn.max_length,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        prefix=paged,
        key_lengths_N=attn.key_lengths_N,
    )

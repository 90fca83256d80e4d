"""Attention within the sequences of a packed batch, and to cached keys that precede them."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.varlen_attention import reference
from anypool.kernels.varlen_attention.paged import PagedKeys

# The largest head that the kernel's tiles have room for.
LARGEST_HEAD = 256

__all__ = ["LARGEST_HEAD", "PagedKeys", "varlen_attention"]


def varlen_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGV: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    prefix: PagedKeys | None = None,
    key_lengths_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(q k^T scale)) v within each sequence; products are summed and the softmax is made in float32.

    Args:
        q_THK: `[T, H, K]` queries.
        k_TGK: `[T, G, K]` keys; G divides H, each key head serves H/G consecutive query heads.
        v_TGV: `[T, G, V]` values.
        cu_seqlens: `[N+1]` int32: sequence i is rows `cu_seqlens[i]:cu_seqlens[i+1]`; it may be empty.
        max_length: No sequence is longer.
        scale: Factor on the scores.
        window: How many keys before and after its own position a query sees; -1 is no limit, so
            (-1, 0) is causal and (-1, -1) bidirectional.
        softcap: c in c tanh(score / c), as in Gemma 2 (arXiv:2408.00118, section 2).
        sinks_H: `[H]` one extra score per head that takes part in the softmax and has no value, as in gpt-oss.
        prefix: Keys that stand before those of each sequence.
        key_lengths_N: `[N]` int32 how many of a sequence's own tokens, the leading ones, are attended to; None for all.
            A query that sees no key gets 0.

    Returns:
        `[T, H, V]` in the dtype of `q_THK`.
    """
    heads, groups = q_THK.shape[1], k_TGK.shape[1]
    assert heads % groups == 0 and v_TGV.shape[1] == groups and q_THK.shape[2] == k_TGK.shape[2]
    assert cu_seqlens.dtype == torch.int32 and (softcap is None or softcap > 0)
    if not uses_triton(q_THK) or max(q_THK.shape[2], v_TGV.shape[2]) > LARGEST_HEAD:
        return reference.varlen_attention(
            q_THK,
            k_TGK,
            v_TGV,
            cu_seqlens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
            prefix=prefix,
            key_lengths_N=key_lengths_N,
        )
    from anypool.kernels.varlen_attention import triton

    return triton.varlen_attention(
        q_THK,
        k_TGK,
        v_TGV,
        cu_seqlens,
        max_length,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        prefix=prefix,
        key_lengths_N=key_lengths_N,
    )

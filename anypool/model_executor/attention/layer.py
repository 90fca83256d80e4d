"""What one attention layer asks of a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anypool.errors import EngineError
from anypool.model_executor.attention.choice import Layer, attention_way
from anypool.model_executor.attention.grouped import grouped_attention
from anypool.model_executor.attention.metadata import AttentionMetadata
from anypool.model_executor.attention.packed import kernel_attention, torch_attention


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer's attention.

    Attributes:
        scale: Factor on the scores.
        window: How many keys before and after its own position a query sees, -1 for no limit:
            (-1, 0) is causal, (-1, -1) bidirectional, (w - 1, 0) a causal sliding window of w tokens.
        softcap: c in c tanh(score / c), or None.
    """

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None

    def __call__(
        self,
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        attn: AttentionMetadata,
        *,
        sinks_H: torch.Tensor | None = None,
        bias_HMM: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends within each sequence.

        Args:
            q_THK: `[T, H, K]` queries.
            k_TGK: `[T, G, K]` keys, G dividing H.
            v_TGK: `[T, G, K]` values.
            attn: The sequences.
            sinks_H: `[H]` scores that take part in the softmax without a value (gpt-oss), or None.
            bias_HMM: `[H, M, M]` added to the scores, M the longest sequence; a shorter one has its upper left corner.

        Returns:
            `[T, H, K]`.
        """
        layer = Layer(
            dtype=q_THK.dtype,
            key_size=q_THK.shape[2],
            value_size=v_TGK.shape[2],
            has_softcap=self.softcap is not None,
            has_sinks=sinks_H is not None,
            has_bias=bias_HMM is not None,
            has_prefix=attn.prefix is not None and any(attn.prefix.lengths),
            has_fewer_keys=attn.key_lengths is not None,
        )
        way = attention_way(layer, q_THK)
        if way == "varlen":
            return torch_attention(q_THK, k_TGK, v_TGK, attn, scale=self.scale, window=self.window)
        if way == "triton":
            return kernel_attention(
                q_THK,
                k_TGK,
                v_TGK,
                attn,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                sinks_H=sinks_H,
            )
        if attn.is_static:
            raise EngineError("a layer that runs in groups of equal lengths cannot be in a CUDA graph")
        return grouped_attention(
            q_THK,
            k_TGK,
            v_TGK,
            attn,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_H=sinks_H,
            bias_HMM=bias_HMM,
        )


def window_of(*, causal: bool, sliding: int | None = None) -> tuple[int, int]:
    """The window of a layer whose queries see keys at a distance below `sliding` (exclusive), or all of them."""
    reach = -1 if sliding is None else sliding - 1
    return (reach, 0 if causal else reach)

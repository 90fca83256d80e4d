"""transformers' attention over a packed batch: a function of ours, called by modules that know nothing of packing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from anypool.errors import MissingDependencyError, UnsupportedArchitectureError
from anypool.model_executor.attention import Attention, AttentionMetadata
from anypool.model_executor.attention.layer import window_of

PACKED_ATTENTION = "anypool_packed"

# The sequences of the batch that is running, and how often an attention layer asked for them.
_running: ContextVar[tuple[AttentionMetadata, list[int]] | None] = ContextVar("anypool_packed_batch", default=None)


@contextlib.contextmanager
def packed_sequences(attn: AttentionMetadata) -> Iterator[list[int]]:
    """Attention inside is within these sequences. Gives a list of one number: how often it was called."""
    calls = [0]
    token = _running.set((attn, calls))
    try:
        yield calls
    finally:
        _running.reset(token)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function over a packed row: `[1, H, T, K]` in, `[1, T, H, K]` out."""
    running = _running.get()
    if running is None or query.shape[0] != 1 or key.shape[2] != query.shape[2] or position_bias is not None:
        raise UnsupportedArchitectureError(
            f"{type(module).__name__} calls attention in a way that a packed batch does not allow"
        )
    attn, calls = running
    calls[0] += 1
    config = getattr(module, "config", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if getattr(config, "is_causal", True) is False:
        causal = False
    attend = Attention(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window_of(causal=causal, sliding=sliding_window),
        softcap=softcap,
    )
    q_THK, k_TGK, v_TGK = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q_THK, k_TGK, v_TGK, attn, sinks_H=s_aux).unsqueeze(0), None


def register_attention() -> None:
    """Makes the function known to transformers. Outside of a packed batch a module has transformers' sdpa attention.

    Raises:
        MissingDependencyError: transformers is not installed, or older than its attention interface.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingDependencyError(
            "this architecture runs through transformers: pip install 'anypool[transformers]'"
        ) from error
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs) if _running.get() is None else packed_attention(*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if _running.get() is None else None

    AttentionInterface.register(PACKED_ATTENTION, attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, mask)

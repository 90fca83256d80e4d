"""transformers' modules that read images, run by themselves or, for texts, on a packed batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from anypool.errors import MissingDependencyError
from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.transformers_backend import _audit, _progress, _refusal, _running, packed_attention
from anypool.model_executor.weights.repository import Repository

ATTENTION = "anypool_packed_or_alone"


def load_module(
    config: ModelConfig,
    repository: Repository,
    *,
    device: torch.device,
    dtype: torch.dtype,
    claimed: frozenset[str] = frozenset(),
    progress: bool = False,
    cls: str = "AutoModel",
) -> Any:
    """A module of transformers with its weights, whose attention is packed inside `module_batch` and its own outside.

    Args:
        config: What config.json says.
        repository: The checkpoint.
        device, dtype: Where and in what it runs.
        claimed: Tensors that a head has read already.
        progress: Whether a bar is shown.
        cls: The class of transformers that loads it.

    Raises:
        UnsupportedArchitectureError: transformers cannot load it.
        WeightsError: A tensor is missing, left over or of a wrong shape.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "models that read images run through transformers: pip install 'anypool[multimodal]'"
        ) from error
    _register()
    try:
        hf_config = transformers.AutoConfig.for_model(**config.raw)
        with _progress(progress):
            module, report = getattr(transformers, cls).from_pretrained(
                repository.folder,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # transformers and the modules it builds raise whatever they meet
        raise _refusal(config, f"transformers raises {type(error).__name__}: {error}") from error
    heads = (name for name in report["unexpected_keys"] if re.search(r"(^|\.)lm_head\.", name))
    _audit(config, report, claimed | frozenset(heads))
    return module.eval().requires_grad_(False).to(device)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (sdpa_attention_forward if _running.get() is None else packed_attention)(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if _running.get() is None else None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)


@contextmanager
def module_batch(attn: AttentionMetadata) -> Iterator[None]:
    """Inside it the module runs on a packed row of these sequences."""
    token = _running.set((attn, [0]))
    try:
        yield
    finally:
        _running.reset(token)


def packed_text(
    input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata, sequences: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
    """Some sequences of a packed batch as a batch of their own.

    Returns:
        Ids, positions, the sequences, and `[t]` the place of each of their tokens in the whole batch.
    """
    if len(sequences) == len(attn.lengths):
        return input_ids_T, positions_T, attn, torch.arange(len(input_ids_T), device=input_ids_T.device)
    is_chosen_N = torch.zeros(len(attn.lengths), dtype=torch.bool)
    is_chosen_N[list(sequences)] = True
    rows_T = is_chosen_N.repeat_interleave(torch.tensor(attn.lengths)).nonzero().squeeze(1).to(input_ids_T.device)
    group = AttentionMetadata.from_lengths(tuple(attn.lengths[i] for i in sequences), input_ids_T.device)
    return input_ids_T[rows_T], positions_T[rows_T], group, rows_T

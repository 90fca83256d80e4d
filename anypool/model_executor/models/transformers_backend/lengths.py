"""Modules of transformers that compute otherwise for long texts: they take a batch's longest for all of it, and some
remember what they have seen.

So texts of different kinds run apart, and what a module remembers is put right before each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class _Rotary(NamedTuple):
    """A rotary embedding whose frequencies follow the length.

    Attributes:
        module: It.
        prefix: Of its attributes for one type of layer; empty where it has but one.
        is_dynamic: Whether every length above `trained` has frequencies of its own, and the longest is remembered;
            LongRoPE has two sets of frequencies.
        trained: The length up to which frequencies are the same.
    """

    module: Any
    prefix: str
    is_dynamic: bool
    trained: int


class LengthRules:
    """What a module makes of the length of a text.

    Args:
        model: A module of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rotaries = tuple(_rotaries(model))
        self._sparse_from = _sparse_from(model)

    @property
    def frequencies_follow(self) -> bool:
        """Whether rotary frequencies follow the length of a text, which transformers takes for that of a chunk."""
        return bool(self._rotaries)

    @property
    def treat_all_alike(self) -> bool:
        """Whether there are no such rules."""
        return not self._rotaries and self._sparse_from is None

    def kind(self, length: int) -> int:
        """A number that is equal for texts that may share a run."""
        kind = 0
        for rotary in self._rotaries:
            if length > rotary.trained:
                kind = max(kind, length if rotary.is_dynamic else 1)
        if self._sparse_from is not None and length > self._sparse_from:
            kind = length  # blocks are counted from the start, and global ones stand at the end as well
        return kind

    def prepare(self, length: int) -> None:
        """Puts what the module remembers right for a run whose longest text has this length."""
        for rotary in self._rotaries:
            if rotary.is_dynamic:
                module, prefix = rotary.module, rotary.prefix
                original: torch.Tensor = getattr(module, f"{prefix}original_inv_freq")
                device = getattr(module, f"{prefix}inv_freq").device
                module.register_buffer(f"{prefix}inv_freq", original.to(device), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", rotary.trained)
        if self._sparse_from is not None:
            self._model.set_attention_type("original_full" if length <= self._sparse_from else "block_sparse")


def _rotaries(model: nn.Module) -> Iterator[_Rotary]:
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        by_layer = found if isinstance(found, dict) else {None: found}
        for layer_type, rope_type in by_layer.items():
            if not isinstance(rope_type, str) or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            rotary: Any = module
            if rope_type == "longrope":
                parameters = rotary.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                trained = parameters["original_max_position_embeddings"]
            else:
                trained = rotary.original_max_seq_len
            prefix = "" if layer_type is None else f"{layer_type}_"
            yield _Rotary(module, prefix, rope_type != "longrope", int(trained))


def _sparse_from(model: Any) -> int | None:
    """The longest text to which BigBird attends fully where it is set to sparse attention."""
    config: Any = getattr(model, "config", None)  # not every encoder has one
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "set_attention_type"):
        return None
    return int((5 + 2 * config.num_random_blocks) * config.block_size)

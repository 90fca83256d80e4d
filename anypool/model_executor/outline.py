"""A model's sizes and operations from its configuration alone: no weights are read, and no memory is taken.

Parameters are those of its modules, built on the meta device. A product of a token's state with a weight is 2
operations per number of the weight; attention is 4 per query, key and feature of a head: scores, and the sum of values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anypool.errors import UnsupportedArchitectureError
from anypool.model_executor.attention.layer import window_of
from anypool.model_executor.model_config import FULL, SLIDING, ModelConfig
from anypool.model_executor.registry import ModelRegistry
from anypool.model_executor.weights.loading import construct
from anypool.model_executor.weights.repository import Repository

# Weights of experts, of which each token meets a few: stacked in one tensor, or a module each.
_EXPERTS = re.compile(r"(^|\.)experts\.")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A backbone without its weights.

    Attributes:
        model: Its modules on the meta device, the LM head left out.
        config: Its configuration.
        parameters: Numbers in its weights.
        flop_per_token: Operations of one token in products with weights.
        width_per_token: Numbers that these products take and give for one token.
        unknown_layers: How many layers mix tokens otherwise than by attention, so that their mixing is not counted.
    """

    model: nn.Module
    config: ModelConfig
    parameters: int
    flop_per_token: int
    width_per_token: int
    unknown_layers: int

    @classmethod
    def of(cls, config: ModelConfig, repository: Repository, *, model_impl: str = "auto") -> Outline:
        """Builds a backbone without its weights.

        Args:
            config: The checkpoint's configuration.
            repository: Its files, for code of its own.
            model_impl: As in the engine's settings.

        Raises:
            UnsupportedArchitectureError: Its operations cannot be told from its configuration.
        """
        model = _build(config, repository, model_impl)
        products = list(_products(model, config))
        return cls(
            model=model,
            config=config,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flop_per_token=sum(round(2 * share * weight.numel()) for weight, share in products),
            width_per_token=sum(round(share * _width(weight)) for weight, share in products),
            unknown_layers=sum(kind not in (FULL, SLIDING) for kind in config.layer_types),
        )

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its weights in a dtype."""
        return self.parameters * dtype.itemsize

    def attention_flop(self, length: int) -> int:
        """Operations of attention for one text of so many tokens. Keys that a query does not see are not counted."""
        config = self.config
        kinds = config.layer_types or (FULL,) * config.num_layers
        head_size = config.head_size or _text(config).get("head_dim") or config.hidden_size // max(config.num_heads, 1)
        per_pair = 4 * config.num_heads * head_size
        return sum(per_pair * self._pairs(kind, length) for kind in kinds if kind in (FULL, SLIDING))

    def flop(self, length: int) -> int:
        """Operations of one text of so many tokens."""
        return length * self.flop_per_token + self.attention_flop(length)

    def _pairs(self, kind: str, length: int) -> int:
        """How many keys the queries of a text see, all together."""
        sliding = self.config.sliding_window if kind == SLIDING else None
        left, right = (_within(reach, length) for reach in window_of(causal=self.config.is_causal, sliding=sliding))
        return length + left + right


def _within(reach: int, length: int) -> int:
    """How many pairs of tokens of a text, the earlier and the later, stand at most `reach` apart; -1 for all."""
    most = length - 1 if reach < 0 else min(reach, length - 1)
    return most * length - most * (most + 1) // 2


def _build(config: ModelConfig, repository: Repository, model_impl: str) -> nn.Module:
    from anypool.model_executor.models.transformers_backend import TransformersModel

    model_cls: Any = ModelRegistry.resolve_model_cls(config, model_impl=model_impl)
    if getattr(model_cls, "image_input", None) is not None or config.num_layers == 0:
        what = "reads images" if config.num_layers else "is a table of vectors, without products of matrices"
        raise UnsupportedArchitectureError(
            f"{config.name} {what}, so its operations per token do not follow from its configuration: measure it with "
            "anypool bench"
        )
    if issubclass(model_cls, TransformersModel):
        from anypool.model_executor.models.transformers_backend.loading import build_without_weights

        whole: nn.Module = build_without_weights(config, repository)
        return whole
    if hasattr(model_cls, "load"):
        raise UnsupportedArchitectureError(
            f"{config.name}: {model_cls.__name__} brings its modules with its weights, so nothing can be told without "
            "them: measure it with anypool bench"
        )
    model: nn.Module = construct(lambda: model_cls(config))
    setattr(model, "lm_head", None)  # noqa: B010 - which a module's type does not allow to be assigned
    return model


def _products(model: nn.Module, config: ModelConfig) -> Iterator[tuple[nn.Parameter, float]]:
    """The weights that tokens' states are multiplied with, and the share of the tokens that meet each."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__:
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() > 1 and not name.endswith("bias"):
                is_expert = _EXPERTS.search(f"{path}.{name}") is not None
                yield weight, _share_of_experts(config) if is_expert else 1.0


def _text(config: ModelConfig) -> Mapping[str, Any]:
    """What config.json says about the language model."""
    text = config.raw.get("text_config")
    return text if isinstance(text, Mapping) else config.raw


def _width(weight: torch.Tensor) -> int:
    """Sizes of input and result of a product with a weight, or of those with all that are stacked in it."""
    return sum(weight.shape[-2:]) * (weight.shape[0] if weight.dim() > 2 else 1)


def _share_of_experts(config: ModelConfig) -> float:
    raw = _text(config)
    chosen, number = (next((raw[key] for key in keys if key in raw), None) for keys in (_CHOSEN, _NUM_EXPERTS))
    if not chosen or not number:
        raise UnsupportedArchitectureError(
            f"{config.name} has experts, and config.json does not say how many of how many a token meets: measure it "
            "with anypool bench"
        )
    return float(chosen) / float(number)

"""What is known about a loaded model without having it: for those who prepare prompts for it, or describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anypool.adapters.heads import Head
from anypool.model_executor.attention.choice import attention_ways
from anypool.model_executor.models.transformers_backend import TransformersModel, Way
from anypool.model_executor.registry import is_encoder_model
from anypool.pooling.heads import LMHeadRows, Normalize
from anypool.pooling.methods import PoolingType
from anypool.pooling.pooler import DispatchPooler, EmbedPooler
from anypool.pooling.tasks import PoolingTask

_BUILT_IN = "anypool.model_executor.models."
_THROUGH_TRANSFORMERS = tuple(_BUILT_IN + name for name in ("transformers_backend", "two_tower", "vision_language"))


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model in memory that hold wherever it is, so that another process can have them.

    Attributes:
        class_name: Of the pooling model.
        runs: What code it is: native, transformers or registered by the user.
        way: How texts share a run of the model.
        rejected: What was tried before that way, and why it was not taken.
        num_parameters: Of all its weights.
        is_encoder: Whether it is a bidirectional encoder.
        attention: Layers by how they attend.
        head_layers: Of the head that gives scores: name, sizes and activation of each layer.
        embed_types: How EMBED pools a text; None where the model has a pooler of its own for it, or none.
        left_out: Tokens of a text that TOKEN_EMBED gives no vector.
        score_type: "late-interaction" where texts are compared by their tokens' vectors; None else.
        image_input: As `Backbone.image_input`.
        processes_texts: Whether texts without images go through the image processor, too.
        image_token_ids: The token in whose places an image stands, and what a text has in its place.
        patch_size: Side of the vision tower's patches in pixels, where they are squares of one size.
    """

    class_name: str
    runs: str
    way: Way
    rejected: tuple[str, ...] = ()
    num_parameters: int
    is_encoder: bool
    attention: Mapping[str, int] = field(default_factory=dict)
    head_layers: tuple[Mapping[str, Any], ...] = ()
    embed_types: tuple[PoolingType, ...] | None = None
    left_out: int = 0
    score_type: str | None = None
    image_input: str | None = None
    processes_texts: bool = False
    image_token_ids: tuple[int, ...] = ()
    patch_size: int | None = None

    @classmethod
    def of(cls, model: nn.Module, head: Head | None, *, device: torch.device, dtype: torch.dtype) -> ModelFacts:
        """The facts about a model that is ready to run."""
        way, rejected = (model.way, model.rejected) if isinstance(model, TransformersModel) else (Way.PACKED, ())
        return cls(
            class_name=type(model).__name__,
            runs=_runs(type(model)),
            way=way,
            rejected=tuple(rejected),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            is_encoder=is_encoder_model(type(model)),
            attention=attention_ways(model, device, dtype),
            head_layers=() if head is None else tuple(_layers(head)),
            embed_types=_embed_types(getattr(model, "pooler", None)),
            left_out=_left_out(getattr(model, "pooler", None)),
            score_type=getattr(model, "score_type", None),
            image_input=getattr(model, "image_input", None),
            processes_texts=bool(getattr(model, "processes_texts", False)),
            image_token_ids=tuple(getattr(model, "image_token_ids", ())),
            patch_size=getattr(model, "patch_size", None),
        )


class Elsewhere(nn.Module):
    """Stands for a module that is in another process."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("this module's weights are in another process, which runs it")


def _runs(model_cls: type) -> str:
    if model_cls.__module__.startswith(_THROUGH_TRANSFORMERS):
        return "transformers"
    return "native" if model_cls.__module__.startswith(_BUILT_IN) else "registered by the user"


def _embed_types(pooler: object) -> tuple[PoolingType, ...] | None:
    if not isinstance(pooler, DispatchPooler) or PoolingTask.EMBED not in pooler.tasks:
        return None
    embed = pooler[PoolingTask.EMBED]
    return embed.types if isinstance(embed, EmbedPooler) else None


def _left_out(pooler: object) -> int:
    if not isinstance(pooler, DispatchPooler) or PoolingTask.TOKEN_EMBED not in pooler.tasks:
        return 0
    return pooler[PoolingTask.TOKEN_EMBED].left_out


def _layers(head: Head) -> list[dict[str, Any]]:
    if isinstance(head.module, LMHeadRows):
        return [_layer("rows of the LM head", head.module)]
    children = list(head.module.children())
    names = [layer.tensor for layer in head.recipe.layers] or [type(child).__name__ for child in children]
    return [_layer(name, child) for name, child in zip(names, children, strict=True)]


def _layer(name: str, module: Any) -> dict[str, Any]:
    if isinstance(module, Normalize):  # of any size
        return {"name": name, "in_features": None, "out_features": None, "activation": None}
    own = getattr(module, "activation", None)
    activation = None if own is None or isinstance(own, nn.Identity) else type(own).__name__.lower()
    sizes = {"in_features": module.in_features, "out_features": module.out_features}
    return {"name": name, **sizes, "activation": activation}

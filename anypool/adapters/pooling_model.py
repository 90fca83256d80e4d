"""`as_pooling_model`: a real subclass of any causal LM or encoder whose LM head is replaced by a task's pooler."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import nn

from anypool.adapters.heads import Head, HeadRecipe
from anypool.errors import UnsupportedTaskError
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import (
    is_encoder_model,
    is_pooling_model,
    is_text_generation_model,
)
from anypool.pooling.methods import PoolingType
from anypool.pooling.pooler import (
    DispatchPooler,
    EmbedPooler,
    Pooler,
    ScorePooler,
    TokenEmbedPooler,
    TokenScorePooler,
)
from anypool.pooling.tasks import PoolingTask, parse_task

_SUFFIXES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|ChatModel|Model)$")

_NAMES = {
    PoolingTask.EMBED: "ForEmbedding",
    PoolingTask.CLASSIFY: "ForSequenceClassification",
    PoolingTask.REWARD: "ForReward",
    PoolingTask.SPARSE_EMBED: "ForSparseEmbedding",
    PoolingTask.TOKEN_EMBED: "ForTokenEmbedding",
    PoolingTask.TOKEN_CLASSIFY: "ForTokenClassification",
}

_made: dict[tuple[type[nn.Module], PoolingTask], type[nn.Module]] = {}


class PoolingMixin:
    """What `as_pooling_model` adds to a class.

    Attributes:
        is_pooling_model: Marks the class.
        pooling_task: The task it was made for.
        pooler: Hidden states of a packed batch -> results, per task.
        default_normalize: Whether embeddings are normalised where nobody says otherwise.
    """

    is_pooling_model: ClassVar[bool] = True
    pooling_task: ClassVar[PoolingTask]
    default_normalize: ClassVar[bool] = True
    pooler: DispatchPooler

    def build_lm_head(self) -> nn.Module | None:
        """No LM head: it is neither allocated nor read."""
        return None

    def build_poolers(self, head: Head | None) -> dict[PoolingTask, Pooler]:
        """A pooler per task: embeddings always, scores where there is a head, else raw states as a decoder's reward."""
        embed = EmbedPooler((PoolingType(getattr(self, "default_pooling_type", "LAST")),))
        poolers: dict[PoolingTask, Pooler] = {PoolingTask.EMBED: embed, PoolingTask.TOKEN_EMBED: TokenEmbedPooler()}
        if head is not None:
            poolers |= score_poolers(head)
        elif self.pooling_task is PoolingTask.REWARD or not is_encoder_model(type(self)):
            poolers[PoolingTask.REWARD] = TokenEmbedPooler()
        return poolers

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Pooling models have no logits."""
        raise UnsupportedTaskError(f"{type(self).__name__} pools and has no LM head, so it has no logits")


def score_poolers(head: Head, *, types: tuple[PoolingType, ...] = ()) -> dict[PoolingTask, Pooler]:
    """The poolers of the tasks that a head serves, over one and the same module.

    Args:
        head: The head.
        types: Pooling types of a sequence-level head, in place of its recipe's.
    """
    by_token = TokenScorePooler(head.module)
    if head.recipe.token_level:
        return {PoolingTask.TOKEN_CLASSIFY: by_token, PoolingTask.REWARD: by_token}
    by_text = ScorePooler(types or (head.recipe.pooling,), head.module)
    return {PoolingTask.CLASSIFY: by_text, PoolingTask.TOKEN_CLASSIFY: by_token, PoolingTask.REWARD: by_text}


def as_pooling_model(model_cls: type[nn.Module], task: PoolingTask | str = PoolingTask.EMBED) -> type[nn.Module]:
    """Makes a class a pooling model for a task.

    The result is a subclass, so LoRA targets, parallel plans and multimodal hooks are inherited. It is made once per
    class and task. `compute_logits` is gone, the LM head is not built, and `pooler` holds a pooler per task.

    It is built from a `ModelConfig` and, where it has one, a `Head`. A class made for "classify" or "token_classify"
    that is given none has an empty linear layer `score` of `config.head.labels` rows, over the row that transformers'
    decoders score, the last token that is no padding, or for an encoder the one that the class pools.

    Args:
        model_cls: A causal LM (it has `compute_logits`), an encoder (`attn_type = "encoder_only"`), or a class that
            pools already, which is returned unchanged.
        task: The task, by name or as a `PoolingTask`.

    Raises:
        TypeError: The class is none of these.
    """
    task = parse_task(task)
    if not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
        raise TypeError(f"as_pooling_model takes an nn.Module class, not {model_cls!r}")
    if is_pooling_model(model_cls):
        return model_cls
    if not (is_text_generation_model(model_cls) or is_encoder_model(model_cls)):
        raise TypeError(
            f"{model_cls.__name__} cannot be made a pooling model: it has no compute_logits, as a causal LM has, "
            "and is not marked as an encoder with attn_type = 'encoder_only'"
        )
    if (model_cls, task) not in _made:
        _made[model_cls, task] = _subclass(model_cls, task)
    return _made[model_cls, task]


def _subclass(model_cls: type[nn.Module], task: PoolingTask) -> type[nn.Module]:
    def __init__(self: Any, config: ModelConfig, head: Head | None = None) -> None:
        model_cls.__init__(self, config)
        if getattr(self, "lm_head", None) is not None:
            self.lm_head = None  # a class of someone else's that builds its head without the hook
        if head is None and task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
            self.score = Linear(config.hidden_size, config.head.labels or 2)
            by_class = getattr(self, "default_pooling_type", None) if is_encoder_model(model_cls) else None
            recipe = HeadRecipe(
                layers=(),
                pooling=PoolingType(by_class or PoolingType.LAST_NOT_PAD),
                token_level=task is PoolingTask.TOKEN_CLASSIFY,
            )
            head = Head(module=self.score, recipe=recipe, labels=self.score.out_features)
        self.pooler = DispatchPooler(self.build_poolers(head))

    name = _SUFFIXES.sub("", model_cls.__name__) + _NAMES[task]
    namespace = {
        "__init__": __init__,
        "__module__": model_cls.__module__,
        "__doc__": f"{model_cls.__name__} as a pooling model for {task.value}.",
        "pooling_task": task,
    }
    return type(name, (PoolingMixin, model_cls), namespace)

"""Pooling settings: the user's over the sentence-transformers files' over the model class's, and who decided each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anypool.adapters.heads import Head
from anypool.adapters.pooling_model import PoolingMixin
from anypool.adapters.recipe import Recipe
from anypool.config import PoolerConfig
from anypool.errors import ConfigError, InvalidParameterError
from anypool.model_executor.model_config import ModelConfig
from anypool.pooling.activations import score_activation_from_path
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import EmbeddingSize, PoolingDefaults, ScoreDefaults, SparseDefaults
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)

_USER, _FILES, _CLASS = "user", "sentence-transformers files", "model class"


@dataclass(frozen=True)
class Setting:
    """A resolved setting and who decided it."""

    value: Any
    source: str


def resolve_settings(
    model_cls: Any,
    config: ModelConfig,
    recipe: Recipe,
    user: PoolerConfig,
    head: Head | None = None,
    *,
    is_sparse: bool = False,
) -> dict[str, Setting]:
    """Each pooling setting from the user, else the sentence-transformers files, else the model class.

    A guess is said, unless there is a head that it is not for: of scores, or of sparse vectors.
    """
    asked = None if user.pooling_types is None else tuple(PoolingType(name) for name in user.pooling_types)
    if asked is not None:
        types = Setting(asked, _USER)
    elif recipe.types is not None:
        types = Setting(recipe.types, _FILES)
    elif recipe.multi_vector is not None:
        types = Setting((PoolingType.ALL,), _FILES)
    else:
        types = Setting((_guess(model_cls, config),), _CLASS)
        if (
            head is None and not is_sparse and issubclass(model_cls, PoolingMixin)
        ):  # another class has a pooler of its own
            logger.warning(
                "%s has no modules.json: pooling %s is a guess; set PoolerConfig(pooling_type=...) if it is another",
                config.name,
                types.value[0],
            )
    normalize = user.normalize if user.normalize is not None else user.use_activation
    settings = {
        "pooling_type": types,
        "normalize": _first(normalize, recipe.normalize, getattr(model_cls, "default_normalize", True)),
        "dimensions": _first(user.dimensions, recipe.truncate_dim, None),
    }
    if head is not None:
        settings |= _score_settings(config, recipe, user, head)
    if user.step_tag_id is not None and not 0 <= user.step_tag_id < config.vocab_size:
        raise ConfigError(
            f"PoolerConfig: step_tag_id={user.step_tag_id} is not a token of {config.name}: "
            f"its ids are 0 to {config.vocab_size - 1}"
        )
    return settings


def _score_settings(config: ModelConfig, recipe: Recipe, user: PoolerConfig, head: Head) -> dict[str, Setting]:
    asked = None if user.pooling_types is None else tuple(PoolingType(name) for name in user.pooling_types)
    if asked is not None and len(asked) > 1 and not head.recipe.token_level:
        raise ConfigError(
            f"PoolerConfig: pooling_type={'+'.join(asked)!r} gives rows of {len(asked) * config.hidden_size}; "
            f"the head of {config.name} takes {config.hidden_size}"
        )
    by_files = None
    for saved, where in (
        (recipe.score_activation, "config_sentence_transformers.json"),
        (config.head.score_activation, "config.json"),
    ):
        if saved is not None and by_files is None and _asked_activation(user) is None:
            by_files = score_activation_from_path(saved, where=f"{config.name}: {where}")
    return {
        "score_pooling_type": _first(asked, recipe.types if recipe.score_modules else None, (head.recipe.pooling,)),
        "activation": _first(_asked_activation(user), by_files, head.activation or _default_activation(config, head)),
        "step_tag_id": _first(user.step_tag_id, None, head.recipe.step_tag_id),
    }


def _asked_activation(user: PoolerConfig) -> str | None:
    return "none" if user.use_activation is False else user.activation


def _default_activation(config: ModelConfig, head: Head) -> str:
    """Softmax over several labels, sigmoid of one or of labels that exclude nothing, none for rewards."""
    if head.is_reward:
        return "softmax" if head.recipe.reported_column is not None else "none"
    if config.head.problem_type == "regression":
        return "none"
    one_of_several = head.labels > 1 and config.head.problem_type != "multi_label_classification"
    return "softmax" if one_of_several else "sigmoid"


def _guess(model_cls: Any, config: ModelConfig) -> PoolingType:
    """The class's own type; MEAN for a decoder that was saved without its LM head, or that attends in both directions.

    So does sentence-transformers since 5.4 with a folder that has no modules.json.
    """
    is_base = config.architecture.endswith("Model") and not config.architecture.endswith("RewardModel")
    is_causal_lm = config.is_causal and not is_base
    if getattr(model_cls, "attn_type", "decoder") == "decoder" and not is_causal_lm:
        return PoolingType.MEAN
    return PoolingType(getattr(model_cls, "default_pooling_type", "LAST"))


def _first(user: Any, files: Any, cls: Any) -> Setting:
    if user is not None:
        return Setting(user, _USER)
    return Setting(files, _FILES) if files is not None else Setting(cls, _CLASS)


def pooling_defaults(
    model: Any,
    config: ModelConfig,
    settings: Mapping[str, Setting],
    size: int,
    user: PoolerConfig,
    head: Head | None,
    sparse: SparseDefaults | None = None,
) -> PoolingDefaults:
    """What a request gets where it asks for nothing.

    Args:
        model: The pooling model.
        config: What config.json says.
        settings: The resolved settings.
        size: Size of its uncut embeddings.
        user: What the user asked for.
        head: What gives scores, where there is one.
        sparse: Of sparse vectors, where it gives them.

    Raises:
        ConfigError: A setting contradicts the model.
    """
    allowed = EmbeddingSize(
        model=config.name,
        full=size,
        allowed=config.matryoshka_dimensions,
        cuttable=config.is_matryoshka is not False,
    )
    dimensions = settings["dimensions"].value
    if dimensions is not None:
        try:
            allowed.check(dimensions)
        except InvalidParameterError as error:
            raise ConfigError(str(error)) from error
    scores = _own_score_defaults(model, user) if head is None else _score_defaults(model, settings, user, head)
    _refuse_without_scores(user, scores)
    _refuse_softmax_of_one(user, scores)
    return PoolingDefaults(
        tasks=model.pooler.tasks,
        size=allowed,
        normalize=settings["normalize"].value,
        dimensions=dimensions,
        scores=scores,
        logit_mean=user.logit_mean or 0.0,
        logit_sigma=user.logit_sigma or 1.0,
        sparse=sparse,
        norms_before_cut=config.family is not None and config.family.norms_before_cut,
    )


def _score_defaults(
    model: Any, settings: Mapping[str, Setting], user: PoolerConfig, head: Head
) -> dict[PoolingTask, ScoreDefaults]:
    """How each task of a head finishes its scores.

    A reward is raw where nobody asks for an activation. A process reward is not: each step's is a probability.
    """
    activation = settings["activation"]
    step_tag_id = _step_tag(user, settings["step_tag_id"].value)
    columns = user.returned_token_ids if head.recipe.layers else None  # LM-head rows are those columns already
    _check_columns(columns, head.labels)
    of_steps = head.recipe.reported_column is not None or (head.recipe.token_level and step_tag_id is not None)
    reward_is_raw = not of_steps and activation.source == _CLASS
    found = {}
    for task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY, PoolingTask.REWARD):
        if task not in model.pooler.tasks:
            continue
        is_reward = task is PoolingTask.REWARD
        token_level = task is PoolingTask.TOKEN_CLASSIFY or head.recipe.token_level
        found[task] = ScoreDefaults(
            activation="none" if is_reward and reward_is_raw else activation.value,
            columns=head.labels,
            token_level=token_level,
            step_tag_id=step_tag_id if token_level else None,
            returned_columns=columns if token_level else None,
            reported_column=head.recipe.reported_column if is_reward else None,
        )
    return found


def _own_score_defaults(model: Any, user: PoolerConfig) -> dict[PoolingTask, ScoreDefaults]:
    """What a class with a pooler of its own says, under what the user says."""
    found = {}
    for task, own in getattr(model, "score_defaults", {}).items():
        changed = replace(own, activation=_asked_activation(user) or own.activation)
        if own.token_level:
            _check_columns(user.returned_token_ids, own.columns)
            changed = replace(
                changed,
                step_tag_id=_step_tag(user, own.step_tag_id if user.step_tag_id is None else user.step_tag_id),
                returned_columns=user.returned_token_ids or own.returned_columns,
            )
        found[task] = changed
    return found


def _step_tag(user: PoolerConfig, step_tag_id: int | None) -> int | None:
    """The tag whose rows are kept; ALL keeps every row."""
    if user.token_pooling_type == "STEP" and step_tag_id is None:
        raise ConfigError("PoolerConfig: pooling_type='STEP' needs step_tag_id, the token whose rows are kept")
    return None if user.token_pooling_type == "ALL" else step_tag_id


def _check_columns(columns: Sequence[int] | None, count: int) -> None:
    for column in columns or ():
        if not 0 <= column < count:
            raise ConfigError(
                f"PoolerConfig: returned_token_ids has {column}; the head has the columns 0 to {count - 1}"
            )


def _refuse_without_scores(user: PoolerConfig, scores: Mapping[PoolingTask, ScoreDefaults]) -> None:
    by_token = any(one.token_level for one in scores.values())
    for name in ("activation", "logit_mean", "logit_sigma"):
        if getattr(user, name) is not None and not scores:
            raise _no_meaning(name, getattr(user, name))
    for name in ("step_tag_id", "returned_token_ids"):
        if getattr(user, name) is not None and not by_token:
            raise _no_meaning(name, getattr(user, name))
    if user.token_pooling_type == "STEP" and not by_token:
        raise _no_meaning("pooling_type", "STEP")


def _refuse_softmax_of_one(user: PoolerConfig, scores: Mapping[PoolingTask, ScoreDefaults]) -> None:
    if user.activation is None and user.returned_token_ids is None:
        return
    for task, one in scores.items():
        columns = one.columns if one.returned_columns is None else len(one.returned_columns)
        if one.activation == "softmax" and columns == 1:
            raise ConfigError(
                f"PoolerConfig: task {task.value!r} would be the softmax of a single score, which is always 1: "
                "use activation='sigmoid' or 'none', or keep several columns"
            )


def _no_meaning(name: str, value: object) -> ConfigError:
    return ConfigError(f"PoolerConfig: {name}={value!r} has no meaning for a model without a head that scores")

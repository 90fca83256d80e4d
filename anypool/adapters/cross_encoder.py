"""A sentence-transformers CrossEncoder: its recipe, and its head where its modules say how it scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anypool.adapters.heads import Head, HeadRecipe
from anypool.adapters.lm_head_rows import rows_head
from anypool.adapters.module_files import (
    CROSS_ENCODER,
    PASSIVE_MODULES,
    read_pooling,
    read_tail,
    transformer_config,
    transformer_settings,
)
from anypool.adapters.module_head import build_head
from anypool.adapters.recipe import Recipe
from anypool.config import is_int
from anypool.errors import CheckpointFormatError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.repository import Repository

_LOGIT_SCORE_KEYS = {"true_token_id", "false_token_id", "module_input_name"}


def read_cross_encoder(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    """One of the three chains that score pairs: a classifier, logits of one or two tokens, or pooling and Dense."""
    kinds = [kind for kind, _ in modules if kind not in PASSIVE_MODULES]
    paths = [path for kind, path in modules if kind not in PASSIVE_MODULES]
    if kinds[:1] != ["Transformer"]:
        raise CheckpointFormatError(f"{repository.name}: modules.json lists {', '.join(kinds)}: no Transformer first")
    task = transformer_config(repository, paths[0])[1].get("transformer_task") or "feature-extraction"
    found: dict[str, Any] = {"backbone": paths[0], **common}
    found |= transformer_settings(repository, paths[0], CROSS_ENCODER)
    if task == "sequence-classification" and len(kinds) == 1:
        return Recipe(**found)
    if task == "text-generation" and kinds[1:] == ["LogitScore"]:
        return Recipe(answer_ids=_answers(repository, paths[1]), **found)
    if task == "feature-extraction" and kinds[1:2] == ["Pooling"] and kinds[-1] == "Dense":
        types, include_prompt = read_pooling(repository, paths[1])
        tail = tuple(read_tail(repository, list(zip(kinds[2:], paths[2:], strict=True)), gives_scores=True))
        return Recipe(types=types, include_prompt=include_prompt, score_modules=tail, **found)
    raise CheckpointFormatError(
        f"{repository.name}: modules.json lists {', '.join(kinds)} for the task {task!r}; a CrossEncoder is a "
        "Transformer alone for 'sequence-classification', Transformer and LogitScore for 'text-generation', or "
        "Transformer, Pooling and modules that end in a Dense for 'feature-extraction'"
    )


def _answers(repository: Repository, path: str) -> tuple[int, ...]:
    where = f"{path}/config.json"
    config = repository.read_object(where)
    if config is None:
        raise CheckpointFormatError(f"{repository.name}: modules.json names {where}, which is not there")
    unknown = sorted(set(config) - _LOGIT_SCORE_KEYS)
    if unknown:
        raise CheckpointFormatError(
            f"{repository.name}: {where} has unknown keys {', '.join(unknown)}; "
            f"known: {', '.join(sorted(_LOGIT_SCORE_KEYS))}"
        )
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if true is None or not all(is_int(one) for one in (true, false) if one is not None):
        raise CheckpointFormatError(
            f"{repository.name}: {where} has true_token_id {true!r} and false_token_id {false!r}, not token ids"
        )
    if config.get("module_input_name") not in (None, "causal_logits"):
        raise CheckpointFormatError(
            f"{repository.name}: {where} has module_input_name {config['module_input_name']!r}; "
            "only 'causal_logits' is supported"
        )
    return (true,) if false is None else (false, true)


def score_head(repository: Repository, recipe: Recipe, config: ModelConfig, checkpoint: Checkpoint) -> Head | None:
    """The head of a CrossEncoder whose modules say how it scores; None where they leave that to the model.

    Args:
        repository: The checkpoint.
        recipe: Its recipe.
        config: The backbone's configuration.
        checkpoint: The backbone's tensors.

    Raises:
        CheckpointFormatError: Its modules do not fit the backbone or one another.
    """
    if recipe.answer_ids:
        return rows_head(config, checkpoint, recipe.answer_ids, difference=len(recipe.answer_ids) == 2)
    if not recipe.score_modules:
        return None
    assert recipe.types is not None
    module, labels = build_head(repository, recipe.score_modules, config.hidden_size * len(recipe.types))
    return Head(module=module, recipe=HeadRecipe(layers=(), pooling=recipe.types[0]), labels=labels)

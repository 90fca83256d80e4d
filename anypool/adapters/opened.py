"""A checkpoint whose small files have been read, before its weights are."""

from __future__ import annotations

from dataclasses import dataclass

from anypool.adapters.colpali_engine import with_base
from anypool.adapters.dense_choice import choose_dense, dense_folders
from anypool.adapters.late_interaction import read_late_interaction
from anypool.adapters.peft_repository import base_of, classifier_of, open_adapter, refuse_another_model
from anypool.adapters.recipe import Recipe, recipe_of_family
from anypool.adapters.sentence_transformers import read_recipe
from anypool.adapters.task_adapters import with_tasks
from anypool.config import EngineConfig
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.static import table_size
from anypool.model_executor.weights.lora import CONFIG as ADAPTER
from anypool.model_executor.weights.lora import PeftAdapter
from anypool.model_executor.weights.repository import TOKENIZER_FILES, Repository


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A checkpoint whose small files have been read, before its weights are.

    Attributes:
        repository: All its files.
        backbone: Those of the transformer, which may lie in a folder of their own.
        config: What config.json says.
        recipe: What the sentence-transformers files say.
        tokenizer: Where the tokenizer is, where the user names no other.
        adapters: LoRA adapters that are merged into it.
    """

    repository: Repository
    backbone: Repository
    config: ModelConfig
    recipe: Recipe
    tokenizer: Repository
    adapters: tuple[PeftAdapter, ...] = ()


def open_model(engine: EngineConfig, *, weights: bool = True) -> OpenedModel:
    """Finds a checkpoint, fetches it, its weights or its small files alone, where it is a hub id, and reads these."""
    repository = Repository.open(engine.model, revision=engine.revision, cache_dir=engine.download_dir, weights=weights)
    repository = with_base(repository, cache_dir=engine.download_dir)
    recipe = read_late_interaction(repository) or read_recipe(repository)
    backbone = tokenizer = repository.subfolder(recipe.backbone)
    adapters: list[PeftAdapter] = []
    if backbone.base is None and backbone.exists(ADAPTER):
        adapters.append(PeftAdapter.read(backbone))
        base = base_of(adapters[0], cache_dir=engine.download_dir)
        base_recipe = read_late_interaction(base) or read_recipe(base)
        if not repository.exists("modules.json"):
            repository, recipe = base, base_recipe
        backbone = base.subfolder(base_recipe.backbone)
        refuse_another_model(tokenizer, backbone)
        tokenizer = tokenizer if any(map(tokenizer.exists, TOKENIZER_FILES)) else backbone
    if engine.lora is not None:
        adapters.append(open_adapter(Repository.open(engine.lora, cache_dir=engine.download_dir)))
    overrides = {**classifier_of(adapters, backbone), **(engine.hf_overrides or {})} or None
    if recipe.multi_vector is not None and recipe.multi_vector.projection is not None:
        overrides = {"architectures": [], **(overrides or {})}  # the one there is stands for any backbone
    if recipe.static is not None:
        config = ModelConfig.of_table(repository.name, table_size(backbone), overrides=overrides)
    else:
        config = ModelConfig.from_pretrained(backbone, overrides=overrides, trust_remote_code=engine.trust_remote_code)
    if config.family is not None:
        recipe = recipe_of_family(recipe, config.family)
    recipe = with_tasks(recipe, backbone, config)
    folders = dense_folders(repository, recipe)
    if folders:
        config = config.replace(is_matryoshka=False)
        asked = None if engine.pooler_config is None else engine.pooler_config.dimensions
        recipe = recipe if asked is None else choose_dense(repository, recipe, folders, asked)
    return OpenedModel(
        repository=repository,
        backbone=backbone,
        config=config,
        recipe=recipe,
        tokenizer=tokenizer,
        adapters=tuple(adapters),
    )

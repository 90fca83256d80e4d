"""The recipe in a sentence-transformers folder: which module follows which, and with what settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anypool.adapters.cross_encoder import read_cross_encoder
from anypool.adapters.layer_weights import read_layer_weights
from anypool.adapters.module_files import (
    CROSS_ENCODER,
    EMBEDDER,
    KINDS,
    PASSIVE_MODULES,
    SPARSE_ENCODER,
    positive,
    read_modules,
    read_pooling,
    read_prompts,
    read_tail,
    read_truncate_dim,
    transformer_config,
    transformer_settings,
)
from anypool.adapters.recipe import Recipe
from anypool.adapters.router import ROUTERS, read_router
from anypool.adapters.sparse_recipe import read_auto_encoder, read_max_active_dims, read_splade
from anypool.adapters.static import read_model2vec, read_static
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.methods import PoolingType
from anypool.pooling.similarity import SIMILARITIES


def read_recipe(repository: Repository) -> Recipe:
    """Reads the recipe; an empty one where the folder has no modules.json.

    Raises:
        CheckpointFormatError: A module, mode, key or file is unknown or missing.
    """
    model = repository.read_object("config_sentence_transformers.json") or {}
    kind = model.get("model_type") or EMBEDDER
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedArchitectureError(
            f"{repository.name}: config_sentence_transformers.json has model_type {kind!r}; "
            f"supported: {', '.join(map(repr, KINDS))}"
        )
    if model.get("similarity_fn_name") not in (None, *SIMILARITIES):
        raise CheckpointFormatError(
            f"{repository.name}: config_sentence_transformers.json has similarity_fn_name "
            f"{model['similarity_fn_name']!r}; known: {', '.join(SIMILARITIES)}"
        )
    prompts, default_prompt_name = read_prompts(repository, model)
    common: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default_prompt_name,
        "truncate_dim": read_truncate_dim(repository, model),
        "similarity_fn_name": model.get("similarity_fn_name"),
        "is_cross_encoder": kind == CROSS_ENCODER,
        "max_active_dims": read_max_active_dims(repository, model),
        "score_activation": model.get("activation_fn") if kind == CROSS_ENCODER else None,
    }
    listed = repository.read_json("modules.json")
    if listed is None:
        static = read_model2vec(repository)
        if static is not None:
            return Recipe(types=(PoolingType.MEAN,), static=static, **{**common, **static.settings})
        return Recipe(**common, **transformer_settings(repository, "", kind))
    modules = read_modules(repository, listed)
    if kind == CROSS_ENCODER:
        return read_cross_encoder(repository, modules, common)
    if kind == EMBEDDER and modules and modules[0][0] == "StaticEmbedding":
        return _static(repository, modules, common)
    if modules and _is_two_tower(repository, modules[0]):
        return _two_tower(repository, modules, common)
    place = next((index for index, (name, _) in enumerate(modules) if name in ROUTERS), None)
    if place is not None:
        return _routed(repository, modules, place, kind, common)
    return _embedder(repository, modules, kind, common)


def _routed(
    repository: Repository, modules: list[tuple[str, str]], place: int, kind: str, common: Mapping[str, Any]
) -> Recipe:
    """One transformer, and after it modules that are not the same for queries and documents."""
    router, chains = read_router(repository, modules[place][1])
    recipes = {
        side: _embedder(repository, [*modules[:place], *chain, *modules[place + 1 :]], kind, common)
        for side, chain in chains.items()
    }
    first = recipes.get(None) or next(iter(recipes.values()))
    if any(replace(recipe, modules=first.modules) != first for recipe in recipes.values()) or (
        first.sparse is not None and any(recipe.modules != first.modules for recipe in recipes.values())
    ):
        raise UnsupportedArchitectureError(
            f"{repository.name}: the routes for queries and documents have different transformers or poolings; "
            "supported are routes that differ in what follows pooling"
        )
    if any(recipe.modules != first.modules for recipe in recipes.values()):
        router = replace(router, heads={side: recipe.modules for side, recipe in recipes.items()})
    return replace(first, router=router)


def _embedder(repository: Repository, modules: list[tuple[str, str]], kind: str, common: Mapping[str, Any]) -> Recipe:
    """A transformer, and what makes dense or sparse vectors of its states."""
    if modules[1:2] and modules[1][0] == "SpladePooling":
        return _splade(repository, modules, common)
    layer_weights = None
    if [kind for kind, _ in modules[:3]] == ["Transformer", "WeightedLayerPooling", "Pooling"]:
        layer_weights = read_layer_weights(repository, modules[1][1])
        modules = [modules[0], *modules[2:]]
    if len(modules) < 2 or [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"]:
        names = ", ".join(kind for kind, _ in modules)
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists {names}; a Transformer followed by a Pooling is supported"
        )
    types, include_prompt = read_pooling(repository, modules[1][1])
    sparse = None
    if modules[-1][0] == "SparseAutoEncoder":
        sparse = read_auto_encoder(repository, modules[-1][1])
        modules = modules[:-1]
    tail = read_tail(repository, modules[2:])
    normalize = bool(tail) and tail[-1][0] == "Normalize"
    return Recipe(
        backbone=modules[0][1],
        types=types,
        include_prompt=include_prompt,
        modules=tuple(tail[:-1] if normalize else tail),
        normalize=normalize,
        sparse=sparse,
        layer_weights=layer_weights,
        **common,
        **transformer_settings(repository, modules[0][1], kind),
    )


def _static(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    """A table of token vectors, whose mean is taken, and what follows."""
    static = read_static(repository.subfolder(modules[0][1]))
    tail = read_tail(repository, modules[1:])
    normalize = bool(tail) and tail[-1][0] == "Normalize"
    return Recipe(
        backbone=modules[0][1],
        types=(PoolingType.MEAN,),
        modules=tuple(tail[:-1] if normalize else tail),
        static=static,
        **{**common, **static.settings, "normalize": normalize},
    )


def _is_two_tower(repository: Repository, first: tuple[str, str]) -> bool:
    """Whether a module gives embeddings of texts and of images by itself, as CLIP does."""
    kind, path = first
    if kind != "Transformer":
        return kind == "CLIPModel"
    modalities = transformer_config(repository, path)[1].get("modality_config") or {}
    return (modalities.get("text") or {}).get("method") == "get_text_features"


def _two_tower(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    kinds = [kind for kind, _ in modules[1:] if kind not in PASSIVE_MODULES]
    if kinds not in ([], ["Normalize"]):
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists {', '.join(kinds)} after a model of texts and images; "
            "only Normalize is supported there"
        )
    name, config = transformer_config(repository, modules[0][1])
    processing = config.get("processing_kwargs") or {}
    text: Mapping[str, Any] = processing.get("text") or {}
    others = [key for key, value in processing.items() if key != "text" and value]
    # How texts are padded changes nothing in CLIP, and SigLIP's are always padded to their full length.
    if unknown := sorted({*others, *(key for key in text if key not in ("max_length", "padding", "truncation"))}):
        raise UnsupportedArchitectureError(
            f"{repository.name}: {name} has processing_kwargs for {', '.join(unknown)}; supported for a model of texts "
            "and images are max_length, padding and truncation of texts"
        )
    return Recipe(
        backbone=modules[0][1],
        normalize=bool(kinds),
        max_seq_length=positive(
            repository, name, {**config, **text}, "max_length" if "max_length" in text else "max_seq_length"
        ),
        do_lower_case=bool(config.get("do_lower_case", False)),
        **common,
    )


def _splade(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    """A masked language model and what makes a weight per word of its logits."""
    kinds = [kind for kind, _ in modules]
    settings = transformer_settings(repository, modules[0][1], SPARSE_ENCODER)
    task = transformer_config(repository, modules[0][1])[1].get("transformer_task")
    # Before version 5.4 the model of a masked language model had a class of its own.
    is_masked = kinds[0] == "MLMTransformer" or (kinds[0] == "Transformer" and task == "fill-mask")
    if not is_masked or len(modules) > 2:
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists {', '.join(kinds)} for the task {task!r}; SpladePooling is "
            "supported alone after a Transformer for 'fill-mask', or a MLMTransformer"
        )
    return Recipe(backbone=modules[0][1], sparse=read_splade(repository, modules[1][1]), **common, **settings)

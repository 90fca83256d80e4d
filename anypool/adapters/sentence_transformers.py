"""The recipe in a sentence-transformers folder: which module follows which, and with what settings.

Both dialects are read: `pooling_mode_mean_tokens: true` of versions before 5.4 and `pooling_mode: "mean"` since.
Module types are matched by their last dotted component, which is all that stayed the same between versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from torch import nn

from anypool.adapters.heads import Head, HeadRecipe
from anypool.adapters.layer_weights import LayerWeights, read_layer_weights
from anypool.adapters.lm_head_rows import rows_head
from anypool.adapters.multi_vector import MultiVectorRecipe
from anypool.adapters.router import ROUTERS, RouterRecipe, read_router
from anypool.adapters.sparse_recipe import SparseRecipe, read_auto_encoder, read_max_active_dims, read_splade
from anypool.adapters.static import StaticRecipe, read_model2vec, read_static
from anypool.config import is_int
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.families import Family, SkipRule
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint, open_checkpoint
from anypool.model_executor.weights.loading import load_module
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.activations import activation_from_path
from anypool.pooling.heads import Dense, LayerNorm, Normalize
from anypool.pooling.methods import PoolingType
from anypool.pooling.similarity import SIMILARITIES

_MODES = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}
# In the order in which several modes are concatenated.
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS = {"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_OLD_MODES}
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PASSIVE_MODULES = ("Dropout",)
_DENSE_KEYS = {
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
    "use_residual",
}
_EMBEDDER, _CROSS_ENCODER, _SPARSE_ENCODER = "SentenceTransformer", "CrossEncoder", "SparseEncoder"
# What the Transformer of each task gives: the name of its output, and the model's output that it is.
_TASKS = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "text-generation": ("causal_logits", "logits"),
    "fill-mask": ("token_embeddings", "logits"),
}
# Which of them each kind of model has.
_KINDS = {
    _EMBEDDER: ("feature-extraction",),
    _CROSS_ENCODER: ("feature-extraction", "sequence-classification", "text-generation"),
    _SPARSE_ENCODER: ("feature-extraction", "fill-mask"),
}
_LOGIT_SCORE_KEYS = {"true_token_id", "false_token_id", "module_input_name"}
# Options of a chat template that are about its tokens, not variables that it sees.
_TEMPLATE_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}
# Every model knows these two names; a checkpoint may give them a text.
_DEFAULT_PROMPTS = {"query": "", "document": ""}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a checkpoint's vectors or scores are made, as its sentence-transformers files say.

    Attributes:
        is_cross_encoder: Whether it scores pairs of texts.
        backbone: Folder of the transformer inside the checkpoint.
        types: Pooling types; None where no file says.
        include_prompt: Whether tokens of a prompt take part in pooling.
        skip_rule: How many leading tokens a prompt that is not pooled takes.
        modules: (type, path, config) of what follows pooling, the closing Normalize left out.
        normalize: Whether vectors are normalised at the end; None where no file says.
        prompts: Text put before an input, by name.
        default_prompt_name: The prompt used where none is asked for.
        max_seq_length: Longest input in tokens, special ones included.
        do_lower_case: Whether text is lower-cased first.
        truncate_dim: How many dimensions are kept by default.
        similarity_fn_name: How vectors are meant to be compared.
        score_activation: Dotted path of the activation that a CrossEncoder was saved with.
        answer_ids: Tokens whose logits give a CrossEncoder's score: false and true, or true alone.
        score_modules: (type, path, config) of what turns a CrossEncoder's pooled row into scores.
        message_format: "flat" or "structured" where texts, or a CrossEncoder's pairs, go through the chat template.
        template_variables: What that template sees beside them.
        router: Which way queries and documents go, where they go different ones.
        sparse: What makes sparse vectors of a SparseEncoder.
        max_active_dims: How many of their weights are kept; None for all, or for what `sparse` says.
        multi_vector: How token vectors are made, where the checkpoint is about these.
        static: How texts are read where the backbone is a table of token vectors.
        layer_weights: Whose hidden states are pooled, where these are not the last layer's alone.
    """

    is_cross_encoder: bool = False
    backbone: str = ""
    types: tuple[PoolingType, ...] | None = None
    include_prompt: bool = True
    skip_rule: SkipRule = "prompt"
    modules: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    normalize: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    truncate_dim: int | None = None
    similarity_fn_name: str | None = None
    score_activation: str | None = None
    answer_ids: tuple[int, ...] = ()
    score_modules: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    message_format: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    router: RouterRecipe | None = None
    sparse: SparseRecipe | None = None
    max_active_dims: int | None = None
    multi_vector: MultiVectorRecipe | None = None
    static: StaticRecipe | None = None
    layer_weights: LayerWeights | None = None


def read_recipe(repository: Repository) -> Recipe:
    """Reads the recipe; an empty one where the folder has no modules.json.

    Raises:
        CheckpointFormatError: A module, mode, key or file is unknown or missing.
    """
    model = repository.read_object("config_sentence_transformers.json") or {}
    kind = model.get("model_type") or _EMBEDDER
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedArchitectureError(
            f"{repository.name}: config_sentence_transformers.json has model_type {kind!r}; "
            f"supported: {', '.join(map(repr, _KINDS))}"
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
        "is_cross_encoder": kind == _CROSS_ENCODER,
        "max_active_dims": read_max_active_dims(repository, model),
        "score_activation": model.get("activation_fn") if kind == _CROSS_ENCODER else None,
    }
    listed = repository.read_json("modules.json")
    if listed is None:
        static = read_model2vec(repository)
        if static is not None:
            return Recipe(types=(PoolingType.MEAN,), static=static, **{**common, **static.settings})
        return Recipe(**common, **transformer_settings(repository, "", kind))
    modules = read_modules(repository, listed)
    if kind == _CROSS_ENCODER:
        return _cross_encoder(repository, modules, common)
    if kind == _EMBEDDER and modules and modules[0][0] == "StaticEmbedding":
        return _static(repository, modules, common)
    if modules and _is_two_tower(repository, modules[0]):
        return _two_tower(repository, modules, common)
    place = next((index for index, (name, _) in enumerate(modules) if name in ROUTERS), None)
    if place is not None:
        return _routed(repository, modules, place, kind, common)
    return _embedder(repository, modules, kind, common)


def recipe_of_family(recipe: Recipe, family: Family) -> Recipe:
    """What a family does where its files say nothing. Files that say how to pool are taken at their word."""
    if recipe.types is not None or family.types is None:
        return recipe
    return replace(
        recipe,
        types=family.types,
        include_prompt=family.include_prompt,
        skip_rule=family.skip_rule,
        normalize=family.normalize,
        prompts={**recipe.prompts, **family.prompts},
        default_prompt_name=recipe.default_prompt_name or family.default_prompt_name,
    )


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
    types, include_prompt = _pooling(repository, modules[1][1])
    sparse = None
    if modules[-1][0] == "SparseAutoEncoder":
        sparse = read_auto_encoder(repository, modules[-1][1])
        modules = modules[:-1]
    tail = _tail(repository, modules[2:])
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
    tail = _tail(repository, modules[1:])
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
        max_seq_length=_positive(
            repository, name, {**config, **text}, "max_length" if "max_length" in text else "max_seq_length"
        ),
        do_lower_case=bool(config.get("do_lower_case", False)),
        **common,
    )


def _splade(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    """A masked language model and what makes a weight per word of its logits."""
    kinds = [kind for kind, _ in modules]
    settings = transformer_settings(repository, modules[0][1], _SPARSE_ENCODER)
    task = transformer_config(repository, modules[0][1])[1].get("transformer_task")
    # Before version 5.4 the model of a masked language model had a class of its own.
    is_masked = kinds[0] == "MLMTransformer" or (kinds[0] == "Transformer" and task == "fill-mask")
    if not is_masked or len(modules) > 2:
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists {', '.join(kinds)} for the task {task!r}; SpladePooling is "
            "supported alone after a Transformer for 'fill-mask', or a MLMTransformer"
        )
    return Recipe(backbone=modules[0][1], sparse=read_splade(repository, modules[1][1]), **common, **settings)


def _cross_encoder(repository: Repository, modules: list[tuple[str, str]], common: Mapping[str, Any]) -> Recipe:
    """One of the three chains that score pairs: a classifier, logits of one or two tokens, or pooling and Dense."""
    kinds = [kind for kind, _ in modules if kind not in PASSIVE_MODULES]
    paths = [path for kind, path in modules if kind not in PASSIVE_MODULES]
    if kinds[:1] != ["Transformer"]:
        raise CheckpointFormatError(f"{repository.name}: modules.json lists {', '.join(kinds)}: no Transformer first")
    task = transformer_config(repository, paths[0])[1].get("transformer_task") or "feature-extraction"
    found: dict[str, Any] = {"backbone": paths[0], **common}
    found |= transformer_settings(repository, paths[0], _CROSS_ENCODER)
    if task == "sequence-classification" and len(kinds) == 1:
        return Recipe(**found)
    if task == "text-generation" and kinds[1:] == ["LogitScore"]:
        return Recipe(answer_ids=_answers(repository, paths[1]), **found)
    if task == "feature-extraction" and kinds[1:2] == ["Pooling"] and kinds[-1] == "Dense":
        types, include_prompt = _pooling(repository, paths[1])
        tail = tuple(_tail(repository, list(zip(kinds[2:], paths[2:], strict=True)), gives_scores=True))
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


def read_prompts(repository: Repository, model: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts of config_sentence_transformers.json by name, and the name of the default one."""
    given, default = model.get("prompts") or {}, model.get("default_prompt_name")
    if not isinstance(given, Mapping) or not all(text is None or isinstance(text, str) for text in given.values()):
        raise CheckpointFormatError(
            f"{repository.name}: config_sentence_transformers.json has prompts {given!r}, not texts by name"
        )
    prompts = _DEFAULT_PROMPTS | {name: text or "" for name, text in given.items()}
    if default is not None and default not in prompts:
        raise CheckpointFormatError(
            f"{repository.name}: config_sentence_transformers.json has default_prompt_name {default!r}; "
            f"its prompts are {', '.join(map(repr, prompts))}"
        )
    return prompts, default


def read_truncate_dim(repository: Repository, model: Mapping[str, Any]) -> int | None:
    """How many dimensions config_sentence_transformers.json says are kept; None where it says nothing."""
    return _positive(repository, "config_sentence_transformers.json", model, "truncate_dim")


def read_modules(repository: Repository, listed: Any) -> list[tuple[str, str]]:
    """(type, path) of every module, in the order of the list: that is the order in which they run."""
    modules = []
    for entry in listed if isinstance(listed, list) else [listed]:
        kind, path = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not (isinstance(kind, str) and isinstance(path, str)):
            raise CheckpointFormatError(
                f"{repository.name}: modules.json is not a list of modules with a type and a path: it has {entry!r}"
            )
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise CheckpointFormatError(f"{repository.name}: modules.json names {path!r}, outside the checkpoint")
        modules.append((kind.rsplit(".", 1)[-1], path))
    if not modules:
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists no modules; a Transformer followed by a Pooling is supported"
        )
    return modules


def transformer_config(repository: Repository, path: str) -> tuple[str, dict[str, Any]]:
    """The name of the file with the transformer's settings, and what it holds; empty where there is none."""
    where = f"{path}/" if path else ""
    found = ((name, repository.read_object(where + name)) for name in _TRANSFORMER_CONFIGS)
    name, config = next(((name, config) for name, config in found if config), ("", {}))
    for key in ("modality_config", "processing_kwargs"):
        given = config.get(key) or {}
        if not isinstance(given, dict) or not all(one is None or isinstance(one, dict) for one in given.values()):
            raise CheckpointFormatError(f"{repository.name}: {name} has {key} {given!r:.80}, not objects by name")
    return name, config


def transformer_settings(repository: Repository, path: str, kind: str) -> dict[str, Any]:
    """Fields of a `Recipe` that the transformer's settings say, for a model of a type."""
    name, config = transformer_config(repository, path)
    modalities = config.get("modality_config") or {}
    task = config.get("transformer_task") or "feature-extraction"
    known = _KINDS.get(kind, _KINDS[_EMBEDDER])
    output, text_output = _TASKS.get(task, (None, None))
    processing = config.get("processing_kwargs") or {}
    template = processing.get("chat_template") if "message" in modalities or kind == _CROSS_ENCODER else None
    for key, value, supported in (
        ("transformer_task", config.get("transformer_task"), known),
        ("module_output_name", config.get("module_output_name"), (output,)),
        ("modality_config text output", (modalities.get("text") or {}).get("method_output_name"), (text_output,)),
        ("processing_kwargs", processing or None, () if template is None else ({"chat_template": template},)),
        ("chat_template option", next(iter(sorted(_TEMPLATE_OPTIONS & set(template or ()))), None), ()),
    ):
        if value is not None and value not in supported:
            raise UnsupportedArchitectureError(
                f"{repository.name}: {name} has {key} {value!r}; supported: {', '.join(map(repr, supported)) or 'none'}"
            )
    length = _positive(repository, name, config, "max_seq_length")
    settings: dict[str, Any] = {"max_seq_length": length, "do_lower_case": bool(config.get("do_lower_case", False))}
    if "message" in modalities:
        settings["message_format"] = modalities["message"].get("format", "structured")
        settings["template_variables"] = template or {}
    return settings


def _positive(repository: Repository, name: str, config: Mapping[str, Any], key: str) -> int | None:
    number: int | None = config.get(key)
    if number is not None and not (is_int(number) and number > 0):
        raise CheckpointFormatError(f"{repository.name}: {name} has {key} {number!r}, not a positive integer")
    return number


def _pooling(repository: Repository, path: str) -> tuple[tuple[PoolingType, ...], bool]:
    where = f"{path}/config.json"
    config = repository.read_object(where)
    if config is None:
        raise CheckpointFormatError(f"{repository.name}: modules.json names {where}, which is not there")
    unknown = sorted(set(config) - _POOLING_KEYS)
    if unknown:
        raise CheckpointFormatError(
            f"{repository.name}: {where} has unknown keys {', '.join(unknown)}; "
            f"known: {', '.join(sorted(_POOLING_KEYS))}"
        )
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or ["mean"]
    listed = modes if isinstance(modes, list) and modes else [modes]
    for mode in listed:
        if not isinstance(mode, str) or mode not in _MODES:
            raise CheckpointFormatError(
                f"{repository.name}: {where}: unknown pooling_mode {mode!r}; known: {', '.join(_MODES)}"
            )
    return tuple(_MODES[mode] for mode in listed), bool(config.get("include_prompt", True))


def _tail(
    repository: Repository, modules: list[tuple[str, str]], *, gives_scores: bool = False
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(type, path, config) of what follows pooling; the last gives a CrossEncoder's scores."""
    kept = [(kind, path) for kind, path in modules if kind not in PASSIVE_MODULES]
    last = kept[-1][1] if kept else ""
    return [
        (kind, path, module_config(repository, kind, path, output="scores" if gives_scores and path == last else None))
        for kind, path in kept
    ]


def module_config(
    repository: Repository, kind: str, path: str, *, rows: str | None = "sentence_embedding", output: str | None = None
) -> Mapping[str, Any]:
    """The module's settings. A Normalize has none, and its empty folder is lost in git and zip copies.

    Args:
        repository: The checkpoint.
        kind: The module's type.
        path: Its folder.
        rows: The name under which it must find what it takes; None where any will do.
        output: The name under which it must leave what it gives; None for the same.
    """
    if kind not in ("Dense", "LayerNorm", "Normalize"):
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists a module {kind!r} that is not supported; "
            f"supported after {'the Transformer' if rows == 'token_embeddings' else 'Pooling'}: Dense, LayerNorm, "
            "Normalize, Dropout"
        )
    config = repository.read_object(f"{path}/config.json")
    if config is None and kind != "Normalize":
        raise CheckpointFormatError(f"{repository.name}: modules.json names {path}/config.json, which is not there")
    config = config or {}
    unknown = sorted(set(config) - _DENSE_KEYS) if kind == "Dense" else []
    if unknown:
        raise CheckpointFormatError(
            f"{repository.name}: {path}/config.json has unknown keys {', '.join(unknown)}; "
            f"known: {', '.join(sorted(_DENSE_KEYS))}"
        )
    for key, supported in (("module_input_name", rows), ("module_output_name", output or rows)):
        if rows is not None and (config.get(key) or rows) != supported:
            raise CheckpointFormatError(
                f"{repository.name}: {path}/config.json has {key} {config.get(key)!r}; only {supported!r} is supported"
            )
    return config


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


def build_head(
    repository: Repository, modules: Sequence[tuple[str, str, Mapping[str, Any]]], in_features: int
) -> tuple[nn.Sequential, int]:
    """Builds and loads the modules that follow pooling, in float32.

    Args:
        repository: The checkpoint.
        modules: Of its recipe.
        in_features: Size of the pooled row.

    Returns:
        The modules in order, and the size of the row they give.

    Raises:
        CheckpointFormatError: Sizes do not follow from one another, or an activation is unknown.
    """
    head = nn.Sequential()
    size = in_features
    for kind, path, config in modules:
        if kind == "Normalize":
            head.append(Normalize())
            continue
        where = f"{repository.name}: {path}/config.json"
        module = _dense(where, config) if kind == "Dense" else LayerNorm(_size(where, config, "dimension"))
        if module.in_features != size:
            raise CheckpointFormatError(
                f"{repository.name}: {path} takes rows of {module.in_features}, but what comes before gives {size}"
            )
        load_module(
            module,
            open_checkpoint(repository, path),
            name=f"{repository.name}/{path}",
            renames=((r"^(dense\.)?(weight|bias)$", r"linear.\2"),),
        )
        head.append(module.requires_grad_(False))
        size = module.out_features
    return head, size


def _dense(where: str, config: Mapping[str, Any]) -> Dense:
    return Dense(
        _size(where, config, "in_features"),
        _size(where, config, "out_features"),
        bias=config.get("bias", True),
        # A file without the key means the default of the class that wrote it.
        activation=activation_from_path(config.get("activation_function", "torch.nn.Tanh"), where=where),
        residual=config.get("use_residual", False),
    )


def _size(where: str, config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointFormatError(f"{where} has {key} {size!r}, not a positive integer")
    return size

"""The files of sentence-transformers' modules, one by one.

Both dialects are read: `pooling_mode_mean_tokens: true` of versions before 5.4 and `pooling_mode: "mean"` since.
Module types are matched by their last dotted component, which is all that stayed the same between versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from anypool.config import is_int
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.methods import PoolingType

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
EMBEDDER, CROSS_ENCODER, SPARSE_ENCODER = "SentenceTransformer", "CrossEncoder", "SparseEncoder"
# What the Transformer of each task gives: the name of its output, and the model's output that it is.
_TASKS = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "text-generation": ("causal_logits", "logits"),
    "fill-mask": ("token_embeddings", "logits"),
}
# Which of them each kind of model has.
KINDS = {
    EMBEDDER: ("feature-extraction",),
    CROSS_ENCODER: ("feature-extraction", "sequence-classification", "text-generation"),
    SPARSE_ENCODER: ("feature-extraction", "fill-mask"),
}
# Options of a chat template that are about its tokens, not variables that it sees.
_TEMPLATE_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}
# Every model knows these two names; a checkpoint may give them a text.
_DEFAULT_PROMPTS = {"query": "", "document": ""}


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
    return positive(repository, "config_sentence_transformers.json", model, "truncate_dim")


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
    known = KINDS.get(kind, KINDS[EMBEDDER])
    output, text_output = _TASKS.get(task, (None, None))
    processing = config.get("processing_kwargs") or {}
    template = processing.get("chat_template") if "message" in modalities or kind == CROSS_ENCODER else None
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
    length = positive(repository, name, config, "max_seq_length")
    settings: dict[str, Any] = {"max_seq_length": length, "do_lower_case": bool(config.get("do_lower_case", False))}
    if "message" in modalities:
        settings["message_format"] = modalities["message"].get("format", "structured")
        settings["template_variables"] = template or {}
    return settings


def positive(repository: Repository, name: str, config: Mapping[str, Any], key: str) -> int | None:
    """A positive integer in the file of a name, or None where it has none."""
    number: int | None = config.get(key)
    if number is not None and not (is_int(number) and number > 0):
        raise CheckpointFormatError(f"{repository.name}: {name} has {key} {number!r}, not a positive integer")
    return number


def read_pooling(repository: Repository, path: str) -> tuple[tuple[PoolingType, ...], bool]:
    """The pooling types of a Pooling, and whether a prompt's tokens take part."""
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


def read_tail(
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

"""PEFT's repositories: an adapter alone, or in the folder of a sentence-transformers model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from anypool.adapters.module_files import read_modules
from anypool.errors import CheckpointFormatError, ModelNotFoundError, UnsupportedArchitectureError
from anypool.model_executor.weights.checkpoint import Checkpoint, ExtendedCheckpoint, open_checkpoint
from anypool.model_executor.weights.lora import CONFIG, ModulePatch, PeftAdapter
from anypool.model_executor.weights.repository import Repository

# What PEFT calls the tasks of models with a head, and what transformers calls the models.
_TASKS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
# Keys of config.json about who wrote it.
_SAYS_NOTHING = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


def open_adapter(repository: Repository) -> PeftAdapter:
    """Reads an adapter.

    Of a sentence-transformers model its Dense modules belong to it, whose names are those that PEFT gives them in the
    whole model, such as `1.linear`.

    Raises:
        ModelLoadError: It cannot be read, or is no LoRA.
    """
    try:
        return _open(repository)
    except OSError as error:
        raise CheckpointFormatError(
            f"{repository.name}: the adapter cannot be read: {error.strerror or error}"
        ) from error


def _open(repository: Repository) -> PeftAdapter:
    listed = repository.read_json("modules.json")
    if listed is None:
        return PeftAdapter.read(repository)
    modules = read_modules(repository, listed)
    adapter = PeftAdapter.read(repository.subfolder(modules[0][1]))
    patches = dict(adapter.patches)
    for number, (kind, folder) in enumerate(modules):
        if kind == "Dense":
            patches |= _dense(repository, folder, f"{number}.linear")
    return replace(adapter, patches=patches)


def base_of(adapter: PeftAdapter, *, cache_dir: str | None = None) -> Repository:
    """The model that an adapter was trained on.

    Raises:
        ModelNotFoundError: The adapter names none, or it is not there.
    """
    if adapter.base is None:
        raise ModelNotFoundError(
            f"{adapter.name}: {CONFIG} names no base_model_name_or_path: load the base, and the adapter with lora="
        )
    try:
        return Repository.open(adapter.base, revision=adapter.revision, cache_dir=cache_dir)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{adapter.name} is a LoRA adapter, and its base cannot be found: {error}. Where it lies elsewhere, load "
            "that, and the adapter with lora="
        ) from error


def refuse_another_model(adapter: Repository, base: Repository) -> None:
    """Refuses an adapter beside which files lie that make another model of its base, such as LLM2Vec's.

    Raises:
        UnsupportedArchitectureError: Its config.json says otherwise than the base's, or it is LLM2Vec's.
    """
    own, theirs = (one.read_object("config.json") for one in (adapter, base))
    is_same = own is None or _what_counts(own) == _what_counts(theirs or {})
    if not is_same or adapter.exists("llm2vec_config.json"):
        raise UnsupportedArchitectureError(
            f"{adapter.name} is a LoRA adapter of {base.name} whose files lie beside a model that is another without "
            "it: merge it into that with peft and save the result, or load the base, and the adapter with lora="
        )


def _what_counts(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about the model itself."""
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING}


def classifier_of(adapters: Sequence[PeftAdapter], base: Repository) -> dict[str, Any]:
    """What config.json would say if the head that an adapter was trained with were in its base: keys to lay over it."""
    config = {} if base.gguf is not None else base.read_object("config.json") or {}
    named = next(iter(config.get("architectures") or ()), "")
    for adapter in adapters:
        if adapter.task in _TASKS and not named.endswith(_TASKS[adapter.task]):
            family = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", named)
            return {"architectures": [family + _TASKS[adapter.task]]}
    return {}


def with_heads(checkpoint: Checkpoint, adapters: Sequence[PeftAdapter]) -> Checkpoint:
    """A checkpoint with the head that an adapter was trained with, where it has none of its own."""
    stored = set(checkpoint.names())
    further: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        if adapter.task in _TASKS:
            for name, patch in adapter.patches.items():
                tensors = {f"{name}.weight": patch.weight, f"{name}.bias": patch.bias}
                further |= {name: x for name, x in tensors.items() if x is not None and name not in stored}
    return ExtendedCheckpoint(checkpoint, further) if further else checkpoint


def _dense(repository: Repository, folder: str, name: str) -> dict[str, ModulePatch]:
    checkpoint = open_checkpoint(repository, folder)
    own = {stored.rpartition(".")[2]: tensor for stored, tensor in checkpoint.tensors(set(checkpoint.names()))}
    if not own.keys() <= {"weight", "bias"} or "weight" not in own or len(own) != len(checkpoint.names()):
        raise CheckpointFormatError(f"{repository.name}: {folder} has {', '.join(checkpoint.names())}, not one product")
    return {name: ModulePatch(name=name, weight=own["weight"], bias=own.get("bias"))}

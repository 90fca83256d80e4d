"""Late-interaction checkpoints: PyLate's, Stanford ColBERT's and sentence-transformers' `MultiVectorEncoder`.

They are read into one `MultiVectorRecipe`. What the formats leave to code is written here: PyLate and Stanford put the
id of a marker behind the first id of each text, sentence-transformers has it as a prompt; all expand queries with mask
tokens and give punctuation in documents no vector (Khattab & Zaharia, arXiv:2004.12832).
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from anypool.adapters.listwise import read_projector
from anypool.adapters.module_files import (
    PASSIVE_MODULES,
    module_config,
    read_modules,
    read_prompts,
    read_truncate_dim,
    transformer_config,
    transformer_settings,
)
from anypool.adapters.module_head import build_head
from anypool.adapters.multi_vector import Expansion, MultiVectorRecipe, SideRecipe
from anypool.adapters.recipe import Recipe
from anypool.config import is_int, is_int_list
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.loading import fill
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.heads import Dense
from anypool.pooling.token_pooling import TokenPooling, token_pooling

STANFORD_ARCHITECTURE = "HF_ColBERT"
_PUNCTUATION = tuple(string.punctuation)
_SETTINGS = "config_sentence_transformers.json"
_PYLATE_KEYS = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens")
# What PyLate itself leaves out of the modules that it finds.
_NOT_OF_TOKENS = ("Pooling", "Normalize", *PASSIVE_MODULES)
_TOKENS = "token_embeddings"
# The sides that a module is about where its file says nothing.
_DOCUMENTS = ("document",)
_SIMILARITIES = ("maxsim", "meanmaxsim")


def read_late_interaction(repository: Repository) -> Recipe | None:
    """The recipe of a multi-vector checkpoint; None where it is another kind.

    Raises:
        CheckpointFormatError: A module, key or value is unknown or missing.
    """
    settings = repository.read_object(_SETTINGS) or {}
    kind = settings.get("model_type")
    if kind == "MultiVectorEncoder":
        return _multi_vector_encoder(repository, settings)
    if kind == "ColBERT" or (kind is None and any(key in settings for key in _PYLATE_KEYS)):
        return _pylate(repository, settings)
    config = {} if repository.gguf is not None else repository.read_object("config.json") or {}
    named = config.get("architectures")  # whether they are names is checked where the configuration is read
    if kind is None and isinstance(named, list) and STANFORD_ARCHITECTURE in named:
        return _stanford(repository)
    return None


class _Reader:
    """Reads the values of a file and checks of what kind they are; null is as if a key were not there."""

    def __init__(self, repository: Repository, where: str, settings: Mapping[str, Any]) -> None:
        self._where, self._settings = f"{repository.name}: {where}", settings

    def _value(self, key: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        value = self._settings.get(key)
        if value is not None and not is_right(value):
            raise CheckpointFormatError(f"{self._where} has {key} {value!r}, not {what}")
        return default if value is None else value

    def text(self, key: str, default: str | None) -> str | None:
        """A text; None where it is empty."""
        found: str | None = self._value(key, default, lambda value: isinstance(value, str), "a text")
        return found or None

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(self._value(key, default, lambda value: isinstance(value, bool), "true or false"))

    def words(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Texts; one alone stands for a list of it."""
        found = self._value(key, default, _is_words, "a list of texts")
        return (found,) if isinstance(found, str) else tuple(found)


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _recipe(
    repository: Repository, backbone: str, settings: Mapping[str, Any], recipe: MultiVectorRecipe, **own: Any
) -> Recipe:
    prompts, default_prompt_name = read_prompts(repository, settings)
    return Recipe(
        backbone=backbone,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        truncate_dim=read_truncate_dim(repository, settings),
        multi_vector=recipe,
        **own,
    )


# PyLate.


def _pylate(repository: Repository, settings: Mapping[str, Any]) -> Recipe:
    """A transformer and Dense modules; everything else PyLate does itself."""
    listed = repository.read_json("modules.json")
    if listed is None:
        raise CheckpointFormatError(f"{repository.name}: {_SETTINGS} is PyLate's, and there is no modules.json")
    (first, backbone), *others = read_modules(repository, listed)
    dense = [(kind, path) for kind, path in others if kind not in _NOT_OF_TOKENS]
    if first != "Transformer" or not dense or any(kind != "Dense" for kind, _ in dense):
        names = ", ".join(kind for kind, _ in [(first, backbone), *others])
        raise CheckpointFormatError(
            f"{repository.name}: modules.json lists {names}; PyLate has a Transformer followed by one Dense or several"
        )
    query_length, document_length = (
        _length(settings, key, repository, default) for key, default in (("query_length", 32), ("document_length", 180))
    )
    read = _Reader(repository, _SETTINGS, settings)
    return _recipe(
        repository,
        backbone,
        settings,
        _colbert(
            library="PyLate",
            markers=(read.text("query_prefix", "[Q] "), read.text("document_prefix", "[D] ")),
            lengths=(query_length, document_length),
            expands=read.flag("do_query_expansion", default=True),
            attended=read.flag("attend_to_expansion_tokens", default=False),
            skiplist=read.words("skiplist_words", _PUNCTUATION),
            modules=tuple((kind, path, _dense_config(repository, path)) for kind, path in dense),
        ),
        normalize=True,
        do_lower_case=transformer_settings(repository, backbone, "ColBERT")["do_lower_case"],
    )


def _dense_config(repository: Repository, path: str) -> Mapping[str, Any]:
    """PyLate takes tokens' states whatever the file says, and has no activation where it says none."""
    config = module_config(repository, "Dense", path, rows=None)
    return {"activation_function": "torch.nn.Identity", **config}


# Stanford ColBERT.


def _stanford(repository: Repository) -> Recipe:
    """A transformer with a projection among its tensors, and settings in artifact.metadata."""
    path = repository.folder / "artifact.metadata"
    metadata: Any = {}
    if path.is_file():
        try:
            metadata = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointFormatError(f"{repository.name}: artifact.metadata is not valid JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise CheckpointFormatError(f"{repository.name}: artifact.metadata is not an object")
    lengths = tuple(
        _length(metadata, key, repository, default, where="artifact.metadata")
        for key, default in (("query_maxlen", 32), ("doc_maxlen", 180))
    )
    read = _Reader(repository, "artifact.metadata", metadata)
    markers = (read.text("query_token_id", None), read.text("doc_token_id", None))
    recipe = _colbert(
        library="Stanford ColBERT",
        markers=(markers[0] or "[unused0]", markers[1] or "[unused1]"),
        lengths=(lengths[0], lengths[1]),
        expands=True,
        attended=read.flag("attend_to_mask_tokens", default=False),
        skiplist=_PUNCTUATION if read.flag("mask_punctuation", default=True) else (),
        projection="linear",
    )
    return _recipe(repository, "", {}, recipe, normalize=True)


def _colbert(
    *,
    library: str,
    markers: tuple[str | None, str | None],
    lengths: tuple[int, int],
    expands: bool,
    attended: bool,
    skiplist: tuple[str, ...],
    **projection: Any,
) -> MultiVectorRecipe:
    """What PyLate and Stanford's code have in common."""
    expansion = Expansion(length=lengths[0], attended=attended) if expands else None
    return MultiVectorRecipe(
        library=library,
        queries=SideRecipe(marker=markers[0], length=lengths[0], expansion=expansion),
        documents=SideRecipe(marker=markers[1], length=lengths[1], skiplist=skiplist),
        unknown_is_skipped=True,
        **projection,
    )


def stanford_projection(name: str, tensor: str, checkpoint: Checkpoint) -> tuple[nn.Sequential, int]:
    """The projection that lies among a backbone's tensors, and the size of the vectors that it gives."""
    weight = f"{tensor}.weight"
    if weight not in checkpoint.names():
        raise WeightsError(f"{name}: the projection of {STANFORD_ARCHITECTURE}, a tensor {weight!r}, is missing")
    rows, columns = checkpoint.shape(weight)
    module = Dense(columns, rows, bias=False, activation=nn.Identity())
    fill(module, checkpoint, {"linear.weight": weight}, name=name)
    return nn.Sequential(module.requires_grad_(False)), rows


# sentence-transformers.


def _multi_vector_encoder(repository: Repository, settings: Mapping[str, Any]) -> Recipe:
    """A transformer and modules over its tokens, one of which says what has a vector."""
    listed = repository.read_json("modules.json")
    if listed is None:
        raise CheckpointFormatError(
            f"{repository.name}: {_SETTINGS} has model_type 'MultiVectorEncoder' without modules"
        )
    (first, backbone), *others = read_modules(repository, listed)
    if first != "Transformer":
        raise CheckpointFormatError(f"{repository.name}: modules.json begins with {first}, not with a Transformer")
    where, transformer = transformer_config(repository, backbone)
    mask: Mapping[str, Any] = {}
    chain: list[tuple[str, str, Mapping[str, Any]]] = []
    pooling: TokenPooling | None = None
    has_mask = False
    for kind, path in others:
        if kind in PASSIVE_MODULES:
            continue
        if pooling is not None:
            raise CheckpointFormatError(f"{repository.name}: modules.json lists {kind} after HierarchicalTokenPooling")
        if kind == "MultiVectorMask":
            mask, has_mask = repository.read_object(f"{path}/config.json") or {}, True
        elif kind == "HierarchicalTokenPooling":
            pooling = _saved_pooling(repository, path)
        else:
            chain.append((kind, path, module_config(repository, kind, path, rows=_TOKENS)))
    normalize = bool(chain) and chain[-1][0] == "Normalize"
    expansion = _saved_expansion(repository, where, transformer.get("query_expansion"))
    if expansion is not None and not expansion.attended and not has_mask:
        expansion = None  # nobody attends to it, and nothing says that it has vectors
    read = _Reader(repository, "the file of MultiVectorMask", mask)
    words, tasks = read.words("skiplist_words", ()), read.words("skiplist_tasks", _DOCUMENTS)
    only = mask.get("keep_only_token_ids") or None
    if only is not None and not is_int_list(only):
        raise CheckpointFormatError(f"{repository.name}: MultiVectorMask has keep_only_token_ids {only!r}, not ids")
    similarity = str(settings.get("similarity_fn_name") or "maxsim").lower()
    if similarity not in _SIMILARITIES:
        raise CheckpointFormatError(
            f"{repository.name}: {_SETTINGS} has similarity_fn_name {settings['similarity_fn_name']!r}; "
            f"known for token vectors: {', '.join(_SIMILARITIES)}"
        )
    sides = {}
    for name in ("query", "document"):
        length = transformer.get(f"{name}_length")
        sides[name] = SideRecipe(
            length=None if length is None else _length(transformer, f"{name}_length", repository, 0, where=where),
            prompt_name=name,
            expansion=expansion if name == "query" else None,
            skiplist=words if name in tasks else (),
        )
    recipe = MultiVectorRecipe(
        library="sentence-transformers",
        queries=sides["query"],
        documents=sides["document"],
        only_token_ids=None if only is None else tuple(only),
        modules=tuple(chain[:-1] if normalize else chain),
        token_pooling=pooling,
        similarity=similarity,
    )
    own = transformer_settings(repository, backbone, "MultiVectorEncoder")
    if "message_format" in own:
        raise UnsupportedArchitectureError(
            f"{repository.name}: {where} puts texts into a chat template, which is not supported for token vectors: "
            "take the entry 'message' out of its modality_config where the model was trained on plain texts"
        )
    return _recipe(repository, backbone, settings, recipe, normalize=normalize, **own)


def _saved_expansion(repository: Repository, where: str, given: Any) -> Expansion | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("strategy") not in ("fixed", "min"):
        raise CheckpointFormatError(f"{repository.name}: {where} has query_expansion {given!r}, neither fixed nor min")
    read = _Reader(repository, f"{where}: query_expansion", given)
    return Expansion(
        length=_length(given, "length", repository, 0, where=f"{where}: query_expansion"),
        cuts=given["strategy"] == "fixed",
        attended=read.flag("attend", default=False),
        token=read.text("token", None),
    )


def _saved_pooling(repository: Repository, path: str) -> TokenPooling | None:
    config = repository.read_object(f"{path}/config.json") or {}
    factor, protected = config.get("pool_factor", 1.0), config.get("num_protected_tokens", 1)
    read = _Reader(repository, f"{path}/config.json", config)
    tasks = read.words("tasks", _DOCUMENTS)
    is_factor = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor >= 1
    if not is_factor or not is_int(protected) or protected < 0:
        raise CheckpointFormatError(
            f"{repository.name}: {path}/config.json has pool_factor {factor!r} and num_protected_tokens {protected!r}"
        )
    if not tasks:
        return None
    if tasks != _DOCUMENTS:
        raise CheckpointFormatError(
            f"{repository.name}: {path}/config.json pools tokens of {tasks!r}; only documents are supported"
        )
    # A file without the key was written before there was one, and means False.
    name = "sentence-transformers" if read.flag("normalize_embeddings", default=False) else "pylate"
    pooling = replace(token_pooling(name, float(factor)), protected=protected)
    return None if pooling.factor <= 1 and pooling.normalize != "all" else pooling


def build_token_head(
    repository: Repository, recipe: MultiVectorRecipe, in_features: int, checkpoint: Checkpoint, *, name: str
) -> tuple[nn.Sequential, int, frozenset[str]]:
    """What turns a token's state into its vector, the vector's size, and the backbone's tensors that are in it."""
    if recipe.is_listwise:
        return read_projector(checkpoint, in_features, name=name)
    if recipe.projection is not None:
        head, size = stanford_projection(name, recipe.projection, checkpoint)
        return head, size, frozenset({f"{recipe.projection}.weight"})
    head, size = build_head(repository, recipe.modules, in_features)
    return head, size, frozenset()


def _length(
    settings: Mapping[str, Any], key: str, repository: Repository, default: int, *, where: str = _SETTINGS
) -> int:
    length = settings.get(key)
    length = default if length is None else length
    if not is_int(length) or length < 1:
        raise CheckpointFormatError(f"{repository.name}: {where} has {key} {length!r}, not a positive number of tokens")
    return int(length)

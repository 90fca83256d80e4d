"""What a sentence-transformers SparseEncoder says about its sparse vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anypool.config import is_int
from anypool.errors import CheckpointFormatError
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.sparse import Strategy

_STRATEGIES: dict[str, Strategy] = {"max": "max", "sum": "sum"}
# Whether each activation takes the logarithm twice.
_TWICE = {"relu": False, "log1p_relu": True}
_SPLADE_KEYS = {"pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension"}
_AUTO_ENCODER_KEYS = {"input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold"}


@dataclass(frozen=True, kw_only=True)
class SpladeRecipe:
    """SPLADE over the logits of a masked language model.

    Attributes:
        strategy: How the weights of all tokens become one per word.
        twice: Whether the logarithm is taken twice.
    """

    strategy: Strategy = "max"
    twice: bool = False


@dataclass(frozen=True, kw_only=True)
class AutoEncoderRecipe:
    """A sparse autoencoder over a dense embedding.

    Attributes:
        path: Its folder in the checkpoint.
        input_dim, hidden_dim: Sizes of the embedding and of the sparse vector.
        k: How many weights are kept where nobody says.
        normalize: Whether embeddings are centred and scaled first.
    """

    path: str
    input_dim: int
    hidden_dim: int
    k: int
    normalize: bool


SparseRecipe = SpladeRecipe | AutoEncoderRecipe


def read_splade(repository: Repository, path: str) -> SpladeRecipe:
    """The settings of a SpladePooling module.

    Raises:
        CheckpointFormatError: A key or a value is unknown, or the file is missing.
    """
    config, where = _config(repository, path, _SPLADE_KEYS)
    strategy, act = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for key, value, known in (("pooling_strategy", strategy, _STRATEGIES), ("activation_function", act, _TWICE)):
        if not isinstance(value, str) or value not in known:
            raise CheckpointFormatError(f"{where} has {key} {value!r}; known: {', '.join(known)}")
    return SpladeRecipe(strategy=_STRATEGIES[strategy], twice=_TWICE[act])


def read_auto_encoder(repository: Repository, path: str) -> AutoEncoderRecipe:
    """The settings of a SparseAutoEncoder module. Errors as for `read_splade`."""
    config, where = _config(repository, path, _AUTO_ENCODER_KEYS)
    sizes = {"input_dim": config.get("input_dim"), "hidden_dim": config.get("hidden_dim", 512), "k": config.get("k", 8)}
    for key, value in sizes.items():
        if not is_int(value) or value < 1:
            raise CheckpointFormatError(f"{where} has {key} {value!r}, not a positive integer")
    return AutoEncoderRecipe(path=path, normalize=bool(config.get("normalize", False)), **sizes)


def read_max_active_dims(repository: Repository, model: Mapping[str, Any]) -> int | None:
    """How many weights config_sentence_transformers.json says are kept; None where it says nothing."""
    most = model.get("max_active_dims")
    if most is not None and not (is_int(most) and most > 0):
        raise CheckpointFormatError(
            f"{repository.name}: config_sentence_transformers.json has max_active_dims {most!r}, not a positive integer"
        )
    return most


def _config(repository: Repository, path: str, known: set[str]) -> tuple[dict[str, Any], str]:
    where = f"{repository.name}: {path}/config.json"
    config = repository.read_object(f"{path}/config.json")
    if config is None:
        raise CheckpointFormatError(f"{repository.name}: modules.json names {path}/config.json, which is not there")
    unknown = sorted(set(config) - known)
    if unknown:
        raise CheckpointFormatError(f"{where} has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return config, where

"""Tables of token vectors: sentence-transformers' StaticEmbedding, and model2vec folders.

Both average the vectors of a text's tokens, and no special tokens are added. They part over unknown tokens: model2vec
leaves them out (its `StaticModel.tokenize`), StaticEmbedding averages their vector as any other. A folder is read as
its modules.json says, which model2vec writes too, and as model2vec reads it where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anypool.config import is_int
from anypool.errors import CheckpointFormatError
from anypool.model_executor.weights.repository import Repository

_MAX_LENGTH = 512  # of model2vec, where a folder says nothing


@dataclass(frozen=True, kw_only=True)
class StaticRecipe:
    """How texts become rows of a table.

    Attributes:
        drops_unknown: Whether unknown tokens are left out.
        max_length: Tokens after which a text is cut; None where it never is.
        normalize: Whether vectors are normalised; None where another file says that.
    """

    drops_unknown: bool = False
    max_length: int | None = None
    normalize: bool | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it says about fields that every recipe has."""
        return {"max_seq_length": self.max_length, "normalize": self.normalize}


def read_static(folder: Repository) -> StaticRecipe:
    """The recipe of a StaticEmbedding's folder: its texts are cut where the saved tokenizer cuts them."""
    tokenizer = folder.read_object("tokenizer.json")
    if tokenizer is None:
        raise CheckpointFormatError(f"{folder.name}: a StaticEmbedding needs tokenizer.json beside its weights")
    truncation = tokenizer.get("truncation")
    length = truncation.get("max_length") if isinstance(truncation, Mapping) else None
    return StaticRecipe(max_length=_length(folder, "tokenizer.json", length))


def read_model2vec(folder: Repository) -> StaticRecipe | None:
    """The recipe of a folder that model2vec wrote without modules.json; None for any other folder."""
    config = folder.read_object("config.json") or {}
    if config.get("model_type") != "model2vec":
        return None
    return StaticRecipe(
        drops_unknown=True,
        max_length=_length(folder, "config.json", config.get("max_length", _MAX_LENGTH)),
        normalize=bool(config.get("normalize", False)),
    )


def _length(folder: Repository, file: str, length: int | None) -> int | None:
    if length is not None and not (is_int(length) and length > 0):
        raise CheckpointFormatError(f"{folder.name}: {file} has max_length {length!r}, not a positive integer")
    return length

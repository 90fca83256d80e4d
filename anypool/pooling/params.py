"""What one request asks of the pooler."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from anypool.config import ACTIVATIONS, contradicts, is_int, is_int_list, is_number
from anypool.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Per-request settings; each one that is set wins over the engine's and the checkpoint's.

    Args:
        dimensions: How many leading dimensions of the embedding to keep, before it is scaled.
        max_active_dims: How many weights of a sparse vector to keep, the largest; ties go to the lower index.
        normalize: Whether the embedding is scaled to unit length.
        use_activation: False for raw scores, and for embeddings that are not scaled.
        activation: What turns scores into probabilities: one of `anypool.config.ACTIVATIONS`.
        step_tag_id: Keep the tokens with this id, of a token-level result.
        returned_token_ids: Columns of a token-level score to keep, before the activation.
        is_query: For the token vectors of a multi-vector model: whether the text is a query. A document where it is
            left out.
        pool_factor: For the token vectors of documents: about how many are joined into one; 1 joins none.
        token_pooling: The way that is done, one of `anypool.pooling.token_pooling.TOKEN_POOLINGS`.
        softmax: Old form of `activation`: True is "softmax", False is "none".

    Raises:
        InvalidParameterError: A value is of the wrong type or out of range, or two contradict each other.
    """

    dimensions: int | None = None
    max_active_dims: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    is_query: bool | None = None
    pool_factor: float | None = None
    token_pooling: str | None = None
    softmax: bool | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "max_active_dims"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise InvalidParameterError(f"{name}={value!r} is not a positive integer", param=name)
        for name in ("normalize", "use_activation", "is_query", "softmax"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InvalidParameterError(f"{name}={value!r} is not a bool", param=name)
        if self.pool_factor is not None and not (is_number(self.pool_factor) and self.pool_factor >= 1):
            raise InvalidParameterError(f"pool_factor={self.pool_factor!r} is not a number from 1", param="pool_factor")
        if self.softmax is not None:
            self._translate_softmax()
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise InvalidParameterError(
                f"activation={self.activation!r} is unknown; known: {', '.join(ACTIVATIONS)}", param="activation"
            )
        if contradicts(self.use_activation, self.activation):
            raise InvalidParameterError(
                f"use_activation={self.use_activation} contradicts activation={self.activation!r}", param="activation"
            )
        if self.step_tag_id is not None and not is_int(self.step_tag_id):
            raise InvalidParameterError(f"step_tag_id={self.step_tag_id!r} is not a token id", param="step_tag_id")
        if self.returned_token_ids is not None:
            if not is_int_list(self.returned_token_ids):
                raise InvalidParameterError(
                    f"returned_token_ids={self.returned_token_ids!r} is not a list of column numbers",
                    param="returned_token_ids",
                )
            object.__setattr__(self, "returned_token_ids", tuple(self.returned_token_ids))

    def _translate_softmax(self) -> None:
        name = "softmax" if self.softmax else "none"
        if self.activation is not None:
            raise InvalidParameterError("softmax and activation are the same setting: give activation", param="softmax")
        warnings.warn(f"PoolingParams(softmax=) is old: use activation={name!r}", DeprecationWarning, stacklevel=4)
        object.__setattr__(self, "activation", name)
        object.__setattr__(self, "softmax", None)

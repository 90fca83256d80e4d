"""What one request asks of the pooler."""

from __future__ import annotations

from dataclasses import dataclass

from anypool.config import is_int
from anypool.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Per-request settings; each one that is set wins over the engine's and the checkpoint's.

    Args:
        dimensions: How many leading dimensions of the embedding to keep, before it is scaled.
        normalize: Whether the embedding is scaled to unit length.

    Raises:
        InvalidParameterError: A value is of the wrong type or out of range.
    """

    dimensions: int | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (not is_int(self.dimensions) or self.dimensions < 1):
            raise InvalidParameterError(f"dimensions={self.dimensions!r} is not a positive integer", param="dimensions")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise InvalidParameterError(f"normalize={self.normalize!r} is not a bool", param="normalize")

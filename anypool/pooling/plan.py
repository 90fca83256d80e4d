"""A request's parameters, resolved against the engine's settings and the model: made before any work is done."""

from __future__ import annotations

from dataclasses import dataclass

from anypool.errors import InvalidParameterError, UnsupportedTaskError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True, kw_only=True)
class EmbeddingSize:
    """Which embedding sizes a model can give.

    Attributes:
        model: Name of the model, for messages.
        full: Size of the uncut embedding.
        allowed: The sizes it was trained to be cut to, beside the full one; None where the checkpoint names none, so
            that any cut is taken.
        cuttable: False where the checkpoint says that it must not be cut.
    """

    model: str
    full: int
    allowed: tuple[int, ...] | None = None
    cuttable: bool = True

    def check(self, dimensions: int) -> int:
        """Returns `dimensions`, or raises an `InvalidParameterError` that says what is allowed."""
        if not self.cuttable and dimensions != self.full:
            supported = str(self.full)
        elif self.allowed is not None:
            sizes = sorted({*(size for size in self.allowed if size < self.full), self.full})
            supported = "" if dimensions in sizes else ", ".join(map(str, sizes))
        else:
            supported = "" if 1 <= dimensions <= self.full else f"1 to {self.full}"
        if supported:
            raise InvalidParameterError(
                f"dimensions={dimensions} is not available for {self.model}: it supports {supported}",
                param="dimensions",
            )
        return dimensions


@dataclass(frozen=True, kw_only=True)
class PoolingDefaults:
    """What a request gets where it asks for nothing: the engine's settings over the checkpoint's over the class's."""

    tasks: tuple[PoolingTask, ...]
    size: EmbeddingSize
    normalize: bool
    dimensions: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """What one request gets. Requests with equal plans share every step of the pooler."""

    task: PoolingTask
    normalize: bool
    dimensions: int | None = None


def make_plan(task: PoolingTask, params: PoolingParams, defaults: PoolingDefaults) -> PoolingPlan:
    """Resolves `params`; raises an `InvalidRequestError` naming the field that cannot be served."""
    if task not in defaults.tasks:
        raise UnsupportedTaskError(
            f"task {task.value!r} is not served by {defaults.size.model}; it serves {', '.join(defaults.tasks)}",
            param="task",
        )
    if task is PoolingTask.EMBED:
        dimensions = defaults.dimensions
        if params.dimensions is not None:
            dimensions = defaults.size.check(params.dimensions)
        return PoolingPlan(task=task, normalize=_first(params.normalize, defaults.normalize), dimensions=dimensions)
    if params.dimensions is not None:
        raise InvalidParameterError(
            f"dimensions={params.dimensions} has no meaning for task {task.value!r}; it goes with 'embed'",
            param="dimensions",
        )
    return PoolingPlan(task=task, normalize=_first(params.normalize, True))


def _first(asked: bool | None, otherwise: bool) -> bool:
    return otherwise if asked is None else asked

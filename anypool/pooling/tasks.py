"""The tasks a pooling model can serve."""

from __future__ import annotations

from enum import Enum

from anypool.errors import InvalidParameterError, UnsupportedTaskError


class PoolingTask(str, Enum):
    """What the caller wants. `score` and `rerank` are calls built on these, not tasks."""

    EMBED = "embed"
    CLASSIFY = "classify"
    REWARD = "reward"
    SPARSE_EMBED = "sparse_embed"
    TOKEN_EMBED = "token_embed"
    TOKEN_CLASSIFY = "token_classify"

    def __str__(self) -> str:
        return self.value


def parse_task(name: str) -> PoolingTask:
    """The task of that name, or an `InvalidParameterError` that lists the known ones."""
    try:
        return PoolingTask(name)
    except ValueError:
        known = ", ".join(task.value for task in PoolingTask)
        raise InvalidParameterError(f"pooling_task={name!r} is unknown; known: {known}", param="task") from None


def encode2pooling_task(supported: tuple[PoolingTask, ...]) -> PoolingTask:
    """The task that the old name `encode` stands for: token_embed, else token_classify, else an error."""
    for task in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY):
        if task in supported:
            return task
    raise UnsupportedTaskError(
        f"pooling_task='encode' needs token_embed or token_classify; this model serves {', '.join(supported)}",
        param="task",
    )

"""Every error that anypool raises on purpose.

    AnypoolError
    ├── ConfigError(ValueError)                  an engine argument or a PoolerConfig contradicts itself or the model
    ├── ModelLoadError(ValueError)               a checkpoint cannot be loaded
    │   ├── ModelNotFoundError                   no such folder, file or hub repository
    │   ├── UnsupportedArchitectureError         nothing here can run this architecture
    │   ├── CheckpointFormatError                a file of the checkpoint is damaged or says something unknown
    │   └── WeightsError                         tensors are missing, left over or of a wrong shape
    ├── InvalidRequestError(ValueError)          a request cannot be served as asked (HTTP 400)
    │   ├── InvalidPromptError                   the prompt is not text or token ids of this model
    │   ├── PromptTooLongError                   the prompt has more tokens than the model takes
    │   ├── InvalidParameterError                a parameter of the request is out of its range
    │   └── UnsupportedTaskError                 the model does not serve this task
    ├── MissingDependencyError(ImportError)      an optional package is not installed
    └── EngineError(RuntimeError)                the engine failed, the request was fine (HTTP 5xx)
        ├── OverloadedError                      the queue is full (HTTP 429 with Retry-After)
        ├── NonFiniteResultError                 the model gave NaN or infinity for this request
        ├── DeadlineExceededError                the request's time was up before it had run (HTTP 504)
        ├── ReplicaDiedError                     the replicas that ran the request died, twice
        ├── OutOfMemoryError                     the request alone needs more memory than there is
        └── EngineDeadError                      the engine is shut down, or a thread or process of it has died

Users' mistakes are `ValueError`s and name what was given, what is allowed and what to do.
Broken invariants of our own are plain assertions.
"""

from __future__ import annotations


class AnypoolError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AnypoolError, ValueError):
    """An engine argument or a `PoolerConfig` is wrong or contradicts the model."""


class ModelLoadError(AnypoolError, ValueError):
    """A checkpoint cannot be loaded."""


class ModelNotFoundError(ModelLoadError):
    """There is no such folder, file or hub repository."""


class UnsupportedArchitectureError(ModelLoadError):
    """Nothing here can run this architecture; the message lists what is known."""


class CheckpointFormatError(ModelLoadError):
    """A file of the checkpoint is damaged or says something unknown."""


class WeightsError(ModelLoadError):
    """Tensors of the checkpoint are missing, left over or of a wrong shape."""


class InvalidRequestError(AnypoolError, ValueError):
    """A request cannot be served as asked. `param` names the field at fault, where one is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidPromptError(InvalidRequestError):
    """A prompt is neither text nor token ids of this model."""


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than the model takes."""


class InvalidParameterError(InvalidRequestError):
    """A parameter of a request is unknown, contradictory or out of its range."""


class UnsupportedTaskError(InvalidRequestError):
    """The loaded model does not serve this task."""


class MissingDependencyError(AnypoolError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class EngineError(AnypoolError, RuntimeError):
    """The engine failed on a request that was fine."""


class OverloadedError(EngineError):
    """The queue holds as many tokens as it may. `retry_after_s` is a guess of when to try again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NonFiniteResultError(EngineError):
    """The model gave NaN or infinity for this request."""


class DeadlineExceededError(EngineError):
    """The request's time was up before its result was there."""


class ReplicaDiedError(EngineError):
    """The replica that ran the request died, and so did the one that ran it again."""


class OutOfMemoryError(EngineError):
    """The request needs more memory than there is, even by itself."""


class EngineDeadError(EngineError):
    """The engine is shut down, or its device thread or one of its processes has died."""

"""What can go wrong with a request while it runs, and the error that its caller gets."""

from __future__ import annotations

from anypool.engine.request import Request
from anypool.errors import (
    AnypoolError,
    DeadlineExceededError,
    EngineError,
    NonFiniteResultError,
    OutOfMemoryError,
    ReplicaDiedError,
)
from anypool.model_executor.faults import is_out_of_memory


def model_error(request: Request, error: Exception) -> AnypoolError:
    """The error of a request that fails by itself."""
    if isinstance(error, AnypoolError):
        return error
    kind = OutOfMemoryError if is_out_of_memory(error) else EngineError
    failure = kind(f"request {request.request_id}: the model raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def non_finite_error(request: Request) -> NonFiniteResultError:
    return NonFiniteResultError(
        f"request {request.request_id}: the model gave NaN or infinity; "
        "its weights may be damaged, or its dtype too narrow"
    )


def replica_error(request: Request, replica: str, reason: str) -> ReplicaDiedError:
    return ReplicaDiedError(
        f"request {request.request_id}: {replica} {reason} while it ran this request alone, after one had died with it "
        "among its requests; it may need more memory than there is"
    )


def outcome_of(error: Exception) -> str:
    """What the metrics call a request that failed."""
    if isinstance(error, NonFiniteResultError):
        return "nan"
    return "expired" if isinstance(error, DeadlineExceededError) else "error"


def deadline_error(request: Request) -> DeadlineExceededError:
    return DeadlineExceededError(f"request {request.request_id}: its time was up before its result was there")

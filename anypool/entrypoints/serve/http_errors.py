"""Errors -> responses, in the shape of the API that was called."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from anypool.entrypoints.serve.schemas.tei import EmptyInputError
from anypool.errors import (
    AnypoolError,
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    MissingDependencyError,
    OverloadedError,
    PromptTooLongError,
)

_INVALID, _SERVER = "invalid_request_error", "server_error"
# Messages quote what was sent, which may be megabytes.
_LONGEST_MESSAGE = 1000


class ErrorStyle(str, Enum):
    """Whose shape an error has."""

    OPENAI = "openai"
    TEI = "tei"
    COHERE = "cohere"


class HTTPError(Exception):
    """An error that only HTTP has, such as a body that is too large."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error as every shape needs it.

    Attributes:
        status: Of the response.
        message: For people.
        kind: Whose fault it is, in OpenAI's words.
        param: The field at fault.
        code: For programs.
        tei: What text-embeddings-inference calls it, and its status there.
        headers: Of the response.
    """

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    tei: tuple[str, int] = ("Validation", 422)
    headers: dict[str, str] = field(default_factory=dict)


def describe(error: Exception) -> Failure:
    """What an error means over HTTP. Nothing of an error that nobody raised on purpose is told, but its class."""
    message = str(error)
    if isinstance(error, HTTPError):
        tei = ("Backend" if error.status >= 500 else "Validation", error.status)
        return Failure(
            status=error.status,
            message=message,
            kind=_SERVER if error.status >= 500 else _INVALID,
            param=error.param,
            code=error.code,
            tei=tei,
            headers=error.headers,
        )
    if isinstance(error, (InvalidRequestError, ConfigError)):
        return _invalid(error, message)
    if isinstance(error, MissingDependencyError):
        return Failure(status=501, message=message, kind=_SERVER, code="not_implemented", tei=("Backend", 501))
    if isinstance(error, OverloadedError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return Failure(
            status=429,
            message=message,
            kind="rate_limit_error",
            code="overloaded",
            tei=("Overloaded", 429),
            headers=wait,
        )
    if isinstance(error, EngineDeadError):
        return Failure(status=503, message=message, kind=_SERVER, code="engine_dead", tei=("Unhealthy", 503))
    if isinstance(error, DeadlineExceededError):
        return Failure(status=504, message=message, kind=_SERVER, code="deadline_exceeded", tei=("Backend", 504))
    if isinstance(error, EngineError) and error.__cause__ is None:
        return Failure(status=500, message=message, kind=_SERVER, tei=("Backend", 424))
    raised = error.__cause__ if isinstance(error, AnypoolError) and error.__cause__ is not None else error
    message = f"the server failed on this request ({type(raised).__name__}); its log says more"
    return Failure(status=500, message=message, kind=_SERVER, tei=("Backend", 424))


def _invalid(error: InvalidRequestError | ConfigError, message: str) -> Failure:
    """A mistake in the request; a chat template that it brings is checked as one of the configuration's."""
    about_input = isinstance(error, (InvalidPromptError, PromptTooLongError))
    param = error.param if isinstance(error, InvalidRequestError) else "chat_template"
    return Failure(
        status=400,
        message=message,
        param=param or ("input" if about_input else None),
        code="context_length_exceeded" if isinstance(error, PromptTooLongError) else None,
        tei=("Empty", 400) if isinstance(error, EmptyInputError) else ("Validation", 422),
    )


def error_body(failure: Failure, style: ErrorStyle, request_id: str) -> tuple[int, bytes]:
    """Status and body; a message that cannot be sent as it is has its odd characters escaped."""
    message = failure.message.encode("utf-8", "backslashreplace").decode()
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    if style is ErrorStyle.TEI:
        kind, status = failure.tei
        return status, orjson.dumps({"error": message, "error_type": kind})
    if style is ErrorStyle.COHERE:
        return failure.status, orjson.dumps({"id": request_id, "message": message})
    detail: dict[str, Any] = {"message": message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return failure.status, orjson.dumps({"error": detail})

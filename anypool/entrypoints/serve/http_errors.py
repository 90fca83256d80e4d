"""Errors -> responses, all of one shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from anypool.entrypoints.serve.schemas.errors import ErrorDetail, ErrorResponse
from anypool.errors import (
    AnypoolError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
)

_INVALID, _SERVER = "invalid_request_error", "server_error"
# Messages quote what was sent, which may be megabytes.
_LONGEST_MESSAGE = 1000
# What nginx logs for a client that went away; nobody reads the response.
_CLIENT_CLOSED_REQUEST = 499

# For the OpenAPI document of a route.
ERROR_RESPONSES: dict[int | str, dict[str, object]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served as asked"},
    "5XX": {"model": ErrorResponse, "description": "The server failed, or is overloaded"},
}


class HTTPError(Exception):
    """An error that only HTTP has, such as a body that is too large."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=_INVALID, param=param, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error that a route may raise, and every route that is not there, the one shape."""
    for kind in (AnypoolError, HTTPError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(http: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        return error_response(error.status_code, _routing_error(http, error), error.headers)
    if isinstance(error, HTTPError):
        return error_response(error.status, error.detail)
    if isinstance(error, InvalidRequestError):
        return error_response(400, _invalid_request(error))
    if isinstance(error, OverloadedError):
        detail = ErrorDetail(message=str(error), type=_SERVER, code="overloaded")
        return error_response(503, detail, {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))})
    if isinstance(error, EngineDeadError):
        return error_response(503, ErrorDetail(message=str(error), type=_SERVER, code="engine_dead"))
    if isinstance(error, DeadlineExceededError):
        return error_response(504, ErrorDetail(message=str(error), type=_SERVER, code="deadline_exceeded"))
    if isinstance(error, EngineError):
        return error_response(500, ErrorDetail(message=str(error), type=_SERVER))
    message = f"the server failed on this request ({type(error).__name__}); its log says more"
    return error_response(500, ErrorDetail(message=message, type=_SERVER))


def error_response(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> Response:
    """A response in the one shape; a message that cannot be sent as it is has its odd characters escaped."""
    message = detail.message.encode("utf-8", "backslashreplace").decode()
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    body = {"error": detail.model_copy(update={"message": message}).model_dump()}
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _invalid_request(error: InvalidRequestError) -> ErrorDetail:
    about_input = isinstance(error, (InvalidPromptError, PromptTooLongError))
    return ErrorDetail(
        message=str(error),
        type=_INVALID,
        param=error.param or ("input" if about_input else None),
        code="context_length_exceeded" if isinstance(error, PromptTooLongError) else None,
    )


def _routing_error(http: Request, error: HTTPException) -> ErrorDetail:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    if error.status_code == 404:
        message = f"there is no {http.url.path} here; GET /openapi.json lists the routes"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{http.url.path} takes {allowed}, not {http.method}"
    else:
        message = str(error.detail)
    return ErrorDetail(message=message, type=_INVALID, code=code)

"""Errors -> answers, each counted, and logged where it is the server's fault."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.http_errors import HTTPError, describe, error_body
from anypool.entrypoints.serve.state import ServerState

logger = logging.getLogger(__name__)

# What nginx logs for a client that went away; nobody reads the response.
_CLIENT_CLOSED_REQUEST = 499


def answer_error(state: ServerState, exchange: Exchange, error: Exception) -> Response:
    """What a client is told of an error, in the shape of the API that it called."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    failure = describe(error)
    state.metrics.failed(failure)
    status, body = error_body(failure, exchange.style, exchange.request_id)
    for path, name in state.hidden:
        body = body.replace(path, name)
    if status >= 500 and not isinstance(error, HTTPError):
        logger.error("request %s failed: %s", exchange.request_id, error, exc_info=_trace(error))
    return Response(body, status, headers=failure.headers, media_type="application/json")


def _trace(error: Exception) -> Exception | None:
    """An error that nobody raised on purpose, or the one behind it, is logged with its trace."""
    is_ours = type(error).__module__.startswith("anypool.") and error.__cause__ is None
    return None if is_ours else error

"""What is around every request: its name, its time, its line in the log, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.failures import answer_error
from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.entrypoints.serve.state import ServerState


class ExchangeMiddleware:
    """Notes each request in an `Exchange`, and each answer in its headers, the metrics and the access log.

    It also answers errors that have no handler. Starlette's handler for those is outside of all middleware, so its
    answers would have no request id and could not be read from other origins, and it raises them once more.

    Args:
        app: What it is around.
        state: The server's.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        exchange = request.state.exchange = Exchange(request)
        is_answered = False

        async def noting(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._note(exchange, message)
            await send(message)

        self._state.metrics.began()
        endpoint = self._state.endpoint_by_path.get(exchange.path) if scope["method"] == "POST" else None
        try:
            if endpoint is not None:  # where it leads is known: past the layers that look for it
                scope["endpoint"] = endpoint
                response = await endpoint(request)
                await response(scope, receive, noting)
            else:
                await self.app(scope, receive, noting)
        except (Exception, asyncio.CancelledError) as error:
            if is_answered or (isinstance(error, asyncio.CancelledError) and not self._state.is_draining):
                raise
            if isinstance(error, asyncio.CancelledError):
                error = HTTPError(503, "the server is shut down", code="shutting_down")
            await answer_error(self._state, exchange, error)(scope, receive, noting)
        finally:
            if not is_answered:
                self._state.metrics.abandoned()

    def _note(self, exchange: Exchange, start: Message) -> None:
        """Notes that an answer begins, before the client can see it."""
        status = start["status"]
        total_ms = 1000 * (time.perf_counter() - exchange.began)
        start["headers"] = [
            *start["headers"],
            (b"x-request-id", exchange.request_id.encode()),
            (b"x-total-time", b"%.3f" % total_ms),
        ]
        route = self._state.route(exchange)
        self._state.metrics.ended(exchange, route, status)
        if self._state.log is not None:
            self._state.log.write(exchange, status)
        if self._state.tracing is not None:
            self._state.tracing.write(exchange, route, status)

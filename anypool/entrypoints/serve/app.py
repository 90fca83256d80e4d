"""The application: routes over engines, and the one place where all of them are guarded, answered and counted."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.access_log import AccessLog
from anypool.entrypoints.serve.auth import Keys
from anypool.entrypoints.serve.call import serve_call
from anypool.entrypoints.serve.cors import Cors
from anypool.entrypoints.serve.exchange import Answer, ClientGoneError, Exchange, Message, Receive, Send
from anypool.entrypoints.serve.http_errors import HTTPError, describe, error_body
from anypool.entrypoints.serve.metrics import ServerMetrics
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes.table import ROUTES
from anypool.entrypoints.serve.served import ServedModel, ServedModels
from anypool.entrypoints.server_options import ServerOptions

logger = logging.getLogger(__name__)

# What nginx logs for a client that went away; nobody reads the response.
_CLIENT_CLOSED_REQUEST = 499
_LONGEST_REQUEST_ID = 128


def create_app(engine: Engine | Sequence[Engine], options: ServerOptions | None = None) -> Application:
    """The HTTP application of engines, to be run by any ASGI server. Closing engines stays with whoever made them.

    Args:
        engine: What serves the requests; of several, the one that a request names, and the first where it names none.
        options: Limits, keys and the like; host, port and what else is about a socket is the server's.

    Raises:
        ConfigError: The file of keys holds none.
        OSError: It cannot be read.
    """
    engines = [engine] if isinstance(engine, Engine) else list(engine)
    options = options or ServerOptions()
    models = [ServedModel(one, trusts_templates=options.trust_request_chat_template) for one in engines]
    return Application(ServedModels(models), options)


class Application:
    """An ASGI application.

    Args:
        models: What it serves.
        options: How.

    Attributes:
        is_draining: Whether it is about to end, so that it is not ready any more.
    """

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        self.models, self.options = models, options
        self.keys = Keys(options.api_key, options.api_key_file)
        self.routes = [route for route in ROUTES if self._is_on(route)]
        self.metrics = ServerMetrics(self.models, [path for route in self.routes for path in route.paths])
        self.is_draining = False
        self._cors = Cors(options.allow_origin)
        self._log = AccessLog(options.log_format) if options.access_log else None
        self._by_path = {path: route for route in self.routes for path in route.paths if "{" not in path}
        self._by_prefix = {
            path.partition("{")[0]: route for route in self.routes for path in route.paths if "{" in path
        }
        # Messages name a model by what was loaded; a path of this machine is nobody's business.
        self._hidden = [
            (model.engine.config.model, model.name) for model in models if model.engine.config.model != model.name
        ]

    def _is_on(self, route: Route) -> bool:
        if "/metrics" in route.paths:
            return self.options.metrics
        return self.options.docs or not {"/docs", "/openapi.json"} & set(route.paths)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            await exchange.send(await self._answer(exchange))
        else:  # a WebSocket, of which there are none
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, exchange: Exchange) -> Answer:
        exchange.request_id = _request_id(exchange.header(b"x-request-id"))
        answer = self._cors.preflight(exchange)
        if answer is None:
            route = self._find(exchange.path)
            self.metrics.began(exchange, route)
            try:
                answer = await self._guarded(exchange, route)
            except ClientGoneError:
                answer = Answer(status=_CLIENT_CLOSED_REQUEST)
            except asyncio.CancelledError:
                if not self.is_draining:
                    raise
                answer = self._failed(exchange, HTTPError(503, "the server is shut down", code="shutting_down"))
            except Exception as error:  # whatever it is, the client gets an answer
                answer = self._failed(exchange, error)
            self.metrics.ended(exchange, route, answer.status)
        answer.headers["x-request-id"] = exchange.request_id
        answer.headers["x-total-time"] = f"{1000 * (time.perf_counter() - exchange.began):.3f}"
        self._cors.allow(exchange, answer)
        if self._log is not None:
            self._log.write(exchange, answer)
        return answer

    async def _guarded(self, exchange: Exchange, route: Route | None) -> Answer:
        """The answer of a route, for whoever may have it."""
        if route is not None:
            exchange.style = route.style
        if route is None or not route.is_public:
            self.keys.check(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        if route is None:
            raise HTTPError(
                404, f"there is no {exchange.path!r:.200} here; GET /docs lists the routes", code="not_found"
            )
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise HTTPError(
                405,
                f"{exchange.path} takes {allowed}, not {exchange.method}",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        if route.answer is not None and (method == "GET" or not route.calls):
            return route.answer(self, exchange)
        return await serve_call(self, exchange, route.calls)

    def _find(self, path: str) -> Route | None:
        route = self._by_path.get(path)
        if route is not None:
            return route
        return next(
            (one for prefix, one in self._by_prefix.items() if path.startswith(prefix) and path != prefix), None
        )

    def _failed(self, exchange: Exchange, error: Exception) -> Answer:
        failure = describe(error)
        self.metrics.failed(exchange, failure)
        status, body = error_body(failure, exchange.style, exchange.request_id)
        for path, name in self._hidden:
            body = body.replace(path.encode(), name.encode())
        if status >= 500 and not isinstance(error, HTTPError):
            logger.error("request %s failed: %s", exchange.request_id, error, exc_info=_trace(error))
        return Answer(body, status, headers=dict(failure.headers))


def _trace(error: Exception) -> Exception | None:
    """An error that nobody raised on purpose, or the one behind it, is logged with its trace."""
    is_ours = type(error).__module__.startswith("anypool.") and error.__cause__ is None
    return None if is_ours else error


def _request_id(given: str | None) -> str:
    """The client's name of the request, where it can be sent back as it is; else one of ours."""
    if given and len(given) <= _LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return

"""The application: FastAPI over engines.

Its routes are Starlette's plain ones, from a request to a response: bodies are parsed in `call.py`, since FastAPI's own
parsing of parameters is slower and its errors have a shape that no client of these APIs knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import anypool
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.call import serve_call
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.failures import answer_error
from anypool.entrypoints.serve.fetching import ImageFetcher
from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.entrypoints.serve.middleware import ExchangeMiddleware
from anypool.entrypoints.serve.models import ServedModels
from anypool.entrypoints.serve.openapi import document
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.served import ServedModel
from anypool.entrypoints.serve.state import ServerState
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import AnypoolError

# What pages from other origins may send and read.
_CORS_METHODS = ("GET", "POST", "HEAD", "OPTIONS")
_CORS_HEADERS = tuple(
    "Authorization Content-Type X-API-Key X-Request-Id X-Request-Timeout Traceparent Tracestate".split()
)
_CORS_EXPOSED = tuple(
    "x-request-id x-total-time x-tokenization-time x-queue-time x-inference-time x-compute-tokens x-truncated-tokens "
    "retry-after metadata".split()
)


def create_app(engine: Engine | Sequence[Engine], options: ServerOptions | None = None) -> FastAPI:
    """The HTTP application of engines, to be run by any ASGI server. Closing engines stays with whoever made them.

    Args:
        engine: What serves the requests; of several, the one that a request names, and the first where it names none.
        options: Limits, keys and the like; host, port and what else is about a socket is the server's.

    Raises:
        ConfigError: The file of keys holds none, two models or adapters have one name, or no model takes adapters where
            some may be loaded.
        OSError: It cannot be read.
        MissingDependencyError: Traces are to be exported, and OpenTelemetry is not installed.
    """
    engines = [engine] if isinstance(engine, Engine) else list(engine)
    options = options or ServerOptions()
    fetch = ImageFetcher() if options.allow_image_urls else None
    models = [
        ServedModel(one, trusts_templates=options.trust_request_chat_template, fetch_image=fetch) for one in engines
    ]
    state = ServerState(ServedModels(models, options.lora_dir), options)
    app = FastAPI(
        title="anypool",
        version=anypool.__version__,
        openapi_url=None,  # /openapi.json and /docs are among our routes, behind the key
        redirect_slashes=False,
        lifespan=partial(_lifespan, state),
        exception_handlers={
            HTTPException: partial(_on_http_exception, state),
            **dict.fromkeys((AnypoolError, HTTPError, ClientDisconnect), partial(_on_error, state)),
        },
    )
    app.state.server = state
    for route in state.routes:
        _add(app, state, route)
    # Replacing the method is how FastAPI lets an application bring its own document.
    app.openapi = partial(document, state.routes, has_keys=state.keys.are_needed)  # type: ignore[method-assign]
    app.add_middleware(ExchangeMiddleware, state=state)
    if options.allow_origin:  # the last one added is the outermost
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origin,
            allow_methods=_CORS_METHODS,
            allow_headers=_CORS_HEADERS,
            expose_headers=_CORS_EXPOSED,
        )
    return app


@asynccontextmanager
async def _lifespan(state: ServerState, app: FastAPI) -> AsyncIterator[None]:
    yield
    await state.close()


def _add(app: FastAPI, state: ServerState, route: Route) -> None:
    endpoint = _endpoint(state, route)
    state.route_by_endpoint[endpoint] = route
    for path in route.paths:  # a name at the end takes slashes too, as names on the hub have one
        app.add_route(path.replace("}", ":path}"), endpoint, methods=list(route.methods))
        if route.calls and "POST" in route.methods and "{" not in path:
            state.endpoint_by_path[path] = endpoint


def _endpoint(state: ServerState, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        exchange = Exchange.of(request)
        state.admit(exchange)
        if exchange.path.endswith("\n"):  # which the end of Starlette's pattern matches too
            raise HTTPException(404)
        if route.answer is not None and (request.method in ("GET", "HEAD") or not route.calls):
            return route.answer(state, exchange)
        return await serve_call(state, exchange, route.calls)

    return endpoint


async def _on_error(state: ServerState, request: Request, error: Exception) -> Response:
    return answer_error(state, Exchange.of(request), error)


async def _on_http_exception(state: ServerState, request: Request, error: HTTPException) -> Response:
    """What Starlette itself refuses, in our words: a path or a method that is not there."""
    exchange = Exchange.of(request)
    try:
        state.admit(exchange)
        failure = _in_our_words(error, exchange, _methods(state, exchange))
    except HTTPError as refusal:
        failure = refusal
    return answer_error(state, exchange, failure)


def _methods(state: ServerState, exchange: Exchange) -> list[str]:
    """What a request's path takes; two routes may share one."""
    found = state.route(exchange)
    sharing = [route for route in state.routes if route is found or exchange.path in route.paths]
    return [] if found is None else [method for route in sharing for method in route.methods]


def _in_our_words(error: HTTPException, exchange: Exchange, methods: Sequence[str]) -> HTTPError:
    if error.status_code == 404 or exchange.path.endswith("\n"):
        return HTTPError(404, f"there is no {exchange.path!r:.200} here; GET /docs lists the routes", code="not_found")
    if error.status_code == 405 and methods:
        allowed = ", ".join(methods)
        return HTTPError(
            405,
            f"{exchange.path} takes {allowed}, not {exchange.request.method}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    return HTTPError(error.status_code, error.detail, headers=dict(error.headers or {}))

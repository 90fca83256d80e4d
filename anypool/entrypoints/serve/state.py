"""What all requests of a server share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from anypool.entrypoints.serve.access_log import AccessLog
from anypool.entrypoints.serve.auth import Keys
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.metrics import ServerMetrics
from anypool.entrypoints.serve.models import ServedModels
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes.table import ROUTES
from anypool.entrypoints.serve.tracing import Tracing
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import OverloadedError


class ServerState:
    """The server behind an application, which has it in `app.state.server`.

    Args:
        models: What it serves.
        options: How.

    Attributes:
        keys: Who may call.
        routes: What is on.
        route_by_endpoint: The route that each of the application's endpoints serves.
        endpoint_by_path: The endpoints that run models, which take POST.
        metrics: What is counted.
        log: The access log, where one is kept.
        tracing: What writes spans, where a collector is named.
        is_draining: Whether it is about to end, so that it is not ready any more.
        hidden: What messages must not name, and what they name in its place, in JSON: a path of this machine is
            nobody's business.
    """

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        self.models, self.options = models, options
        self.keys = Keys(options.api_key, options.api_key_file)
        self.routes = [route for route in ROUTES if self._is_on(route)]
        self.route_by_endpoint: dict[Any, Route] = {}
        self.endpoint_by_path: dict[str, Callable[[Request], Awaitable[Response]]] = {}
        self.metrics = ServerMetrics(models, [path for route in self.routes for path in route.paths])
        self.log = AccessLog(options.log_format) if options.access_log else None
        endpoint = options.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self.is_draining = False
        self._running = 0
        hidden = {path: model.name for model in models.all() for path in model.paths if path != model.name}
        # Adapters that come later are named as their path from there is.
        hidden |= {f"{folder}{os.sep}": "" for folder in models.adapters.folders}
        # The longest first, since a folder may lie in another one; as they stand in JSON.
        self.hidden = [
            (orjson.dumps(path)[1:-1], orjson.dumps(hidden[path])[1:-1])
            for path in sorted(hidden, key=len, reverse=True)
        ]

    def _is_on(self, route: Route) -> bool:
        switch = {
            "/metrics": self.options.metrics,
            "/docs": self.options.docs,
            "/openapi.json": self.options.docs,
            "/": self.options.page,
            "/v1/load_lora_adapter": bool(self.options.lora_dir),
            "/v1/unload_lora_adapter": bool(self.options.lora_dir),
        }
        return switch.get(route.paths[0], True)

    async def close(self) -> None:
        """Ends what runs beside the engines."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def check_turn(self) -> None:
        """Refuses a request that could not run now, before its body is read, so that refusing costs little.

        Raises:
            OverloadedError: So many are being served already.
        """
        most = self.options.max_concurrent_requests
        if most is not None and self._running >= most:
            raise OverloadedError(f"{most:,} requests are being served, the limit: try again later", retry_after_s=1)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a request whose body is there: clients that send slowly keep nobody out.

        Raises:
            OverloadedError: So many are being served already.
        """
        self.check_turn()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def route(self, exchange: Exchange) -> Route | None:
        """The route at a request's path, whatever its method; known once the application has looked for it."""
        return self.route_by_endpoint.get(exchange.request.scope.get("endpoint"))

    def admit(self, exchange: Exchange) -> None:
        """Refuses a request without a key, in the shape of its route; an unknown path tells nothing without one.

        Raises:
            HTTPError: The key is missing, or is none of ours.
        """
        route = self.route(exchange)
        if route is not None:
            exchange.style = route.style
        if route is None or not route.is_public:
            self.keys.check(exchange.header("authorization"), exchange.header("x-api-key"))

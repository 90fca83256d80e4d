"""uvicorn around the application: sockets, signals, and an end that loses nothing."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from anypool.config import require
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.access_log import JsonFormatter
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.protocol import BoundedProtocol
from anypool.entrypoints.serve.state import ServerState
from anypool.entrypoints.server_options import ServerOptions

# Connections that wait to be accepted.
_BACKLOG = 2048
# Seconds that an idle connection stays open: longer than load balancers keep theirs, which is a minute as a rule.
_KEEP_ALIVE_S = 75


def bind(host: str, port: int) -> socket.socket:
    """Takes the address, so that one in use is known before a model is loaded. Nobody can connect until `serve`.

    Raises:
        ConfigError: There is no such port.
        OSError: The address is in use, or not this machine's.
    """
    require(0 <= port <= 65535, f"port={port} is not 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def serve(engines: Sequence[Engine], sock: socket.socket, options: ServerOptions) -> None:
    """Serves until SIGINT or SIGTERM: then it is not ready any more, takes no more connections after
    `options.shutdown_delay`, and finishes the requests that are running. A second signal ends it at once.

    Args:
        engines: What serves the requests.
        sock: From `bind`.
        options: Everything else.
    """
    if options.log_format == "json":
        log_as_json()
    app = create_app(engines, options)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        access_log=False,
        log_config=None,
        backlog=_BACKLOG,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=options.drain_timeout,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    )
    Server(config, app, options).run(sockets=[sock])


def log_as_json() -> None:
    """Makes every log line a JSON object."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())


class Server(uvicorn.Server):
    """uvicorn with the application's own end.

    Args:
        config: uvicorn's.
        app: What is served.
        options: How.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, options: ServerOptions) -> None:
        super().__init__(config)
        self._state: ServerState = app.state.server
        self._options = options
        self._stop_at = math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            print(_greeting(sock, self._options, is_secure=self.config.is_ssl), file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end, the second does not wait for it."""
        self._captured_signals.append(sig)
        if self._state.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._state.is_draining = True
            self._stop_at = time.monotonic() + self._options.shutdown_delay

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to take no more connections."""
        if time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


def _greeting(sock: socket.socket, options: ServerOptions, *, is_secure: bool) -> str:
    host, port = sock.getsockname()[:2]
    url = f"{'https' if is_secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    curl = f"""curl {url}/v1/embeddings -H 'Content-Type: application/json' -d '{{"input": "Hello"}}'"""
    shown = (("page", "/", options.page), ("docs", "/docs", options.docs))
    places = ", ".join(f"{name}: {url}{path}" for name, path, is_on in shown if is_on)
    return f"anypool serves on {url}{f' ({places})' if places else ''}\n{curl}"

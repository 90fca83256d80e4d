"""uvicorn around the application."""

from __future__ import annotations

import socket
import sys

import uvicorn

from anypool.config import require
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app


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


def serve(engine: Engine, sock: socket.socket, *, drain_timeout_s: int) -> None:
    """Serves until SIGINT or SIGTERM, then finishes the requests that are running.

    Args:
        engine: What serves the requests.
        sock: From `bind`.
        drain_timeout_s: Seconds that running requests get to finish.
    """
    config = uvicorn.Config(create_app(engine), access_log=False, timeout_graceful_shutdown=drain_timeout_s)
    _Server(config).run(sockets=[sock])


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            print(_greeting(sock), file=sys.stderr, flush=True)


def _greeting(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    curl = f"""curl {url}/v1/embeddings -H 'Content-Type: application/json' -d '{{"input": "Hello"}}'"""
    return f"anypool serves on {url} (docs: {url}/docs)\n{curl}"

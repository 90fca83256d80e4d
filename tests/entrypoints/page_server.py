"""A server in a thread of this process, on a socket of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.server import bind
from anypool.entrypoints.server_options import ServerOptions


@contextmanager
def served(engines: Sequence[Engine], **options: Any) -> Iterator[str]:
    """Serves engines, which stay open, and gives the address."""
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn.Config(create_app(engines, ServerOptions(**options)), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)

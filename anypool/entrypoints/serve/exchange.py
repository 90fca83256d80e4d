"""One HTTP request and its answer, over ASGI.

Every layer that a web framework puts around a handler costs each request; a lone embedding takes about 2 ms, so the
server speaks ASGI itself. This file is all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from anypool.entrypoints.serve.http_errors import ErrorStyle, HTTPError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ResultT = TypeVar("ResultT")

# Seconds of work after which somebody looks whether the client is still there.
_WATCHED_AFTER_S = 0.02


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


@dataclass
class Answer:
    """A response."""

    body: bytes = b""
    status: int = 200
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


class Exchange:
    """A request, and what is known about it so far.

    Attributes:
        style: In whose shape errors are answered.
        request_id: The client's name for it, or one of ours.
        began: When it arrived, on `time.perf_counter`'s clock.
        model: Name of the model that serves it, once known.
        inputs, tokens: How many there are, once known.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._scope, self._receive, self._send = scope, receive, send
        self.began = time.perf_counter()
        self.style = ErrorStyle.OPENAI
        self.request_id = ""
        self.model = ""
        self.inputs = 0
        self.tokens = 0

    @cached_property
    def _headers(self) -> dict[bytes, bytes]:
        return dict(self._scope["headers"])

    def header(self, name: bytes) -> str | None:
        """A header by its name in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def client(self) -> str | None:
        """Address of whoever is connected."""
        address = self._scope.get("client")
        return address[0] if address else None

    async def read_body(self, limit: int, timeout_s: float) -> bytes:
        """The body.

        Raises:
            HTTPError: It has more bytes than `limit`, or is not all there after `timeout_s` seconds.
            ClientGoneError: The client went away.
        """
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > 2 * limit:
            raise _too_large(limit)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            task.cancel()

        timer = loop.call_later(timeout_s, give_up)
        try:
            return await self._read(limit)
        except asyncio.CancelledError:
            if not is_late:
                raise
            raise HTTPError(
                408, f"the body did not arrive within {timeout_s:g} seconds", code="request_timeout"
            ) from None
        finally:
            timer.cancel()

    async def _read(self, limit: int) -> bytes:
        """The body. What is over the limit is thrown away, up to as much again: while a client sends, it does not see
        the answer.
        """
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            else:
                chunks.clear()
            if size > 2 * limit or not message.get("more_body", False):
                break
        if size > limit:
            raise _too_large(limit)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def unless_gone(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Awaits `work`, and cancels it when the client goes away first. The body must have been read before.

        Raises:
            ClientGoneError: The client went away.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        watcher: asyncio.Task[None] | None = None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            task.cancel()

        def start() -> None:
            nonlocal watcher
            watcher = loop.create_task(watch())

        timer = loop.call_later(_WATCHED_AFTER_S, start)  # most work is done by then
        try:
            return await work
        except asyncio.CancelledError:
            if is_gone:
                raise ClientGoneError from None
            raise
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()

    async def send(self, answer: Answer) -> None:
        """Sends the answer."""
        headers = [
            (b"content-length", str(len(answer.body)).encode()),
            (b"content-type", answer.media_type.encode()),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()),
        ]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer.body})


def _too_large(limit: int) -> HTTPError:
    return HTTPError(
        413, f"the body has more than {limit:,} bytes, the limit: send several requests", code="body_too_large"
    )

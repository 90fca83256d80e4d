"""What is known about one request, and the ways to wait for its client that Starlette does not have."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from anypool.entrypoints.serve.http_errors import ErrorStyle, HTTPError

ResultT = TypeVar("ResultT")

# Seconds of work after which somebody looks whether the client is still there.
_WATCHED_AFTER_S = 0.02
_LONGEST_REQUEST_ID = 128


class Exchange:
    """A request, and what is known about it so far. It lies in `request.state.exchange`.

    Attributes:
        request: Starlette's.
        request_id: The client's name for it, or one of ours.
        path: Of its URL, without what the application is mounted under.
        began: When it arrived, on `time.perf_counter`'s clock.
        style: In whose shape errors are answered.
        model: Name of the model that serves it, once known.
        inputs, tokens: How many there are, once known.
        prepare_s, queue_s, inference_s: Seconds for checking and tokenising, in the queue and in the model, once known.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.began = time.perf_counter()
        # The first of each name, as Starlette's Headers say, which go through all of them for every look.
        self._headers: dict[bytes, bytes] = dict(reversed(request.scope["headers"]))
        self.request_id = _request_id(self.header("x-request-id"))
        self.path: str = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        self.style = ErrorStyle.OPENAI
        self.model = ""
        self.inputs = 0
        self.tokens = 0
        self.prepare_s = self.queue_s = self.inference_s = 0.0

    @staticmethod
    def of(request: Request) -> Exchange:
        """The one of a request that came through `ExchangeMiddleware`."""
        found: Exchange = request.state.exchange
        return found

    def header(self, name: str) -> str | None:
        """A header of the request, by its name in lower case."""
        found = self._headers.get(name.encode())
        return None if found is None else found.decode("latin-1")

    async def read_body(self, limit: int, timeout_s: float) -> bytes:
        """The body.

        Raises:
            HTTPError: It has more bytes than `limit`.
            TimeoutError: It is not all there after `timeout_s` seconds.
            ClientDisconnect: The client went away.
        """
        length = self.header("content-length")
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
            raise TimeoutError from None
        finally:
            timer.cancel()

    async def _read(self, limit: int) -> bytes:
        """The body. What is over the limit is thrown away, up to as much again: while a client sends, it does not see
        the answer.
        """
        chunks: list[bytes] = []
        size = 0
        async with aclosing(self.request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                if size > 2 * limit:
                    break
        if size > limit:
            raise _too_large(limit)
        return b"".join(chunks)

    async def unless_gone(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Awaits `work`, and cancels it when the client goes away first. The body must have been read before.

        Raises:
            ClientDisconnect: The client went away.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        watcher: asyncio.Task[None] | None = None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await self.request.receive())["type"] != "http.disconnect":
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
                raise ClientDisconnect from None
            raise
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()


def _request_id(given: str | None) -> str:
    """The client's name of the request, where it can be sent back as it is; else one of ours."""
    if given and len(given) <= _LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _too_large(limit: int) -> HTTPError:
    return HTTPError(
        413, f"the body has more than {limit:,} bytes, the limit: send several requests", code="body_too_large"
    )

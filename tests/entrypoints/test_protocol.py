"""What comes before a body is bounded in size and time, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from anypool.entrypoints.serve import protocol
from anypool.entrypoints.serve.protocol import BoundedProtocol

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body, but for one path."""
    if scope["path"] == "/body":
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(0.6)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def talk(what: Talk) -> Any:
    """What a client gets that does this with a connection."""

    async def main() -> Any:
        config = uvicorn.Config(answer, http=BoundedProtocol, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(what(reader, writer), 20)
        finally:
            writer.close()
            server.close()

    return asyncio.run(main())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes = b"/") -> bytes:
    writer.write(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path)
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(2)


def test_headers_that_never_end_are_431() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(GET + b"X-A: ")
        await asyncio.sleep(0.2)  # so that it is not one piece
        writer.write(b"a" * 100_000)
        return await reader.read()

    found = talk(client)
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in found


@pytest.mark.usefixtures("hurried")
def test_headers_that_come_too_slowly_are_408() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        first = await _get(reader, writer)
        for letter in b"GET":
            writer.write(bytes([letter]))
            await asyncio.sleep(0.05)
        return first + await reader.read()

    assert talk(client).startswith(b"okHTTP/1.1 408 ")


@pytest.mark.usefixtures("hurried")
def test_a_connection_that_says_nothing_is_closed() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        return await reader.read()

    assert talk(client) == b""


@pytest.mark.usefixtures("hurried")
def test_a_request_that_takes_long_and_one_after_a_pause_are_served() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
        slow = await _get(reader, writer, b"/slow")
        await asyncio.sleep(0.6)  # idle: as long as uvicorn keeps it
        writer.write(GET + b"\r\n" + GET)  # one, and the beginning of the next, which waits for it
        await reader.readuntil(b"ok")
        writer.write(b"\r\n")
        return [slow, await reader.readuntil(b"ok")]

    slow, last = talk(client)
    assert slow == b"ok"
    assert last.startswith(b"HTTP/1.1 200 ")


def test_headers_of_many_requests_do_not_add_up() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
        writer.write((GET + b"X-A: " + b"a" * 10_000 + b"\r\n\r\n") * 20)
        return [await reader.readuntil(b"ok") for _ in range(20)]

    assert all(one.startswith(b"HTTP/1.1 200 ") for one in talk(client))


@pytest.mark.usefixtures("hurried")
def test_the_beginning_of_a_request_waits_while_the_one_before_runs() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
        first = await reader.readuntil(b"ok")
        writer.write(b"\r\n")
        return first + await reader.readuntil(b"ok")

    assert talk(client).count(b"HTTP/1.1 200 ") == 2


async def _post(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, length: int) -> bytes:
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length)
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(2)


def test_a_body_that_was_refused_cannot_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, int]:
        found, sent = await _post(writer, reader, 10**12), 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"a" * 1000)
                await writer.drain()
                await asyncio.sleep(0.05)
                sent += 1
        return found, sent

    found, sent = talk(client)
    assert found == b"ok"
    assert 2 <= sent <= 40


def test_a_body_that_was_refused_and_comes_to_its_end_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        found = await _post(writer, reader, 3)
        writer.write(b"abc")
        await asyncio.sleep(0.6)
        return found + await _get(reader, writer)

    assert talk(client) == b"okok"


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_an_offer_of_http_2_is_declined_and_the_request_served(pieces: int) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    sent = b"POST /body HTTP/1.1\r\nHost: a\r\n" + offer + b"Content-Length: 5\r\n\r\nhello"
    size = -(-len(sent) // pieces)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0.02)
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + offer + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        return body + await reader.readexactly(2) + await _get(reader, writer)

    assert talk(client) == b"hellookok"

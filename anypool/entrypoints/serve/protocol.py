"""uvicorn's HTTP over one connection, with bounds for what comes before a body, and after its answer."""

from __future__ import annotations

import asyncio
import sys

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Bytes of a request line and headers, beside those that come in one piece with their beginning.
_LARGEST_HEAD = 64 * 1024
# Seconds that they may take to arrive, and that a new connection may say nothing.
_HEAD_S = 60.0
# Seconds in which a body that was refused may still arrive. Closing at once would reset the connection, and a client
# that is still sending would lose the answer.
_LINGER_S = 5.0
_OF_UPGRADE = (b"upgrade", b"http2-settings", b"connection")


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose next request does not come to its body: it is too large, or too slow. The same for one
    that goes on sending a body which is answered already.

    uvicorn bounds none of it, so anybody, without a key, could fill memory or hold all connections.
    """

    _head_bytes = 0
    _is_in_head = False
    _has_begun = False  # in the piece that is parsed
    _piece = b""
    _timer: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_lingering()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head = self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if not self._declines_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_lingering()
        if not self._declines_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_early = self.cycle.response_complete and self.cycle.more_body  # of a request behind it, neither
        if is_early and not self.transport.is_closing():
            self._lingering = self.loop.call_later(_LINGER_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        self._piece = data
        super().data_received(data)
        self._piece = b""
        if not self._is_in_head or self.transport.is_closing():
            return
        self._head_bytes = 0 if self._has_begun else self._head_bytes + len(data)
        if self._head_bytes > _LARGEST_HEAD:
            self._refuse(431, f"the headers have more than {_LARGEST_HEAD:,} bytes", "headers_too_large")
        elif self._timer is None:
            self._start_timer()

    def _declines_upgrade(self) -> bool:
        """Whether the request offers to go on in a protocol that is not spoken here."""
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Serves such a request all the same, as RFC 9110 (7.8) wants: Java's client offers HTTP/2 with each first one.

        The parser takes what follows the headers, the body included, for the other protocol's. So the request is parsed
        again, without its offer.
        """
        upgrade = sys.exc_info()[1]
        if not isinstance(upgrade, httptools.HttpParserUpgrade) or self._get_upgrade() is None:
            super()._unsupported_upgrade_warning()
            return
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in _OF_UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(b"\r\n".join([*lines, b"", b""]) + self._piece[upgrade.args[0] :])

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(_HEAD_S, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def _is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # nothing is read while the request before is served
        elif self._is_in_head:
            self._refuse(408, f"the headers did not arrive within {_HEAD_S:g} seconds", "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        detail = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": detail})
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

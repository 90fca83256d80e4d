"""Images on the web, fetched for a request: from public addresses only, with limits on time, size and redirects."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

from anypool.errors import InvalidPromptError

_REDIRECTS = (301, 302, 303, 307, 308)
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses are public.

    Raises:
        ValueError: One of them is private, local, reserved or the like.
        OSError: The host has none.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not all(map(is_public, found)):
        raise ValueError("its host is not on the public internet")
    return found[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to one machine on the public internet, however it is written.

    Of IPv6 only 2000::/3 is given out, and what is said to be inside of an address is checked as well: IPv4 in the
    forms of RFC 4291 and RFC 6052. RFC 3056's tunnel to any IPv4 is no way to a server.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF) if found in _TRANSLATED else found.ipv4_mapped
        if inner is None:
            return found.is_global and found in _GIVEN_OUT and found.sixtofour is None
        found = inner
    return found.is_global and not found.is_multicast


@dataclass(frozen=True, kw_only=True)
class ImageFetcher:
    """Fetches the bytes of images.

    The name of a host is resolved once and its address checked before it is connected to, at every redirect again, so
    that no name can lead into the network that the server stands in.

    Attributes:
        max_bytes: Largest file.
        timeout_s: Seconds for all of it.
        max_redirects: How many are followed.
        resolve: Host and port -> the address that is connected to, or a ValueError.
        tls: What an https connection is checked with.
    """

    max_bytes: int = 20 * 1024 * 1024
    timeout_s: float = 10.0
    max_redirects: int = 3
    resolve: Callable[[str, int], str] = public_address
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def __call__(self, url: str, where: str) -> bytes:
        """The bytes at a URL.

        Args:
            url: Of http or https.
            where: What it is, for messages.

        Raises:
            InvalidPromptError: It cannot be had, or not within the limits.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            for _ in range(self.max_redirects + 1):
                content, target = self._get(url, deadline)
                if target is None:
                    return content
                url = urljoin(url, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            is_late = isinstance(error, TimeoutError) or time.monotonic() >= deadline
            reason = "it takes too long" if is_late else str(error) or type(error).__name__
            raise InvalidPromptError(f"{where} cannot be fetched: {reason}", param="messages") from None
        raise InvalidPromptError(
            f"{where} cannot be fetched: it is redirected more than {self.max_redirects} times", param="messages"
        )

    def _get(self, url: str, deadline: float) -> tuple[bytes, str | None]:
        """What is there, or where it has moved."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("its URL is not one of http or https")
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = self.resolve(parts.hostname, port)
        sock = socket.create_connection((address, port), timeout=_left(deadline))
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = sock
        with _ending_at(deadline, sock), closing(connection):
            if secure:
                connection.sock = self.tls.wrap_socket(sock, server_hostname=parts.hostname)
            path = parts.path or "/"
            headers = {"Accept": "image/*", "User-Agent": "anypool", "Accept-Encoding": "identity"}
            connection.request("GET", f"{path}?{parts.query}" if parts.query else path, headers=headers)
            answer = connection.getresponse()
            if answer.status in _REDIRECTS:
                target = answer.getheader("Location")
                if not target:
                    raise ValueError(f"the server answers {answer.status} and no Location")
                return b"", target
            if answer.status != 200:
                raise ValueError(f"the server answers {answer.status}")
            return self._read(answer, deadline), None

    def _read(self, answer: http.client.HTTPResponse, deadline: float) -> bytes:
        content = bytearray()
        while True:
            piece = answer.read1(65_536)
            _left(deadline)  # of a connection that was ended, a part would look like the whole
            if not piece:
                return bytes(content)
            content += piece
            if len(content) > self.max_bytes:
                raise ValueError(f"it has more than {self.max_bytes:,} bytes")


@contextmanager
def _ending_at(deadline: float, sock: socket.socket) -> Iterator[None]:
    """Ends a connection at the deadline. A socket's timeout is for each read, of which a slow server can make many."""
    handle = sock.dup()  # also of the connection that TLS makes of it

    def end() -> None:
        with suppress(OSError):  # it is over
            handle.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        handle.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left

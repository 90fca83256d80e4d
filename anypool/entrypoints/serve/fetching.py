"""Images on the web, fetched for a request: from public addresses only, with limits on time, size and redirects."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from anypool.errors import InvalidPromptError

_REDIRECTS = (301, 302, 303, 307, 308)


def public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses are public.

    Raises:
        ValueError: One of them is private, local, reserved or the like.
        OSError: The host has none.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for one in found:
        address = ipaddress.ip_address(one.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not (mapped or address).is_global or address.is_multicast:
            raise ValueError("its host is not on the public internet")
    return found[0]


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
            reason = "it takes too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise InvalidPromptError(f"{where} cannot be fetched: {reason}", param="messages") from None
        raise InvalidPromptError(
            f"{where} cannot be fetched: it is redirected more than {self.max_redirects} times", param="messages"
        )

    def _get(self, url: str, deadline: float) -> tuple[bytes, str | None]:
        """What is there, or where it has moved."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("its URL is not one of http or https")
        connection = self._connect(parts, deadline)
        try:
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
            return self._read(connection, answer, deadline), None
        finally:
            connection.close()

    def _connect(self, parts: SplitResult, deadline: float) -> http.client.HTTPConnection:
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = self.resolve(parts.hostname, port)
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = socket.create_connection((address, port), timeout=_left(deadline))
        if secure:
            connection.sock = self.tls.wrap_socket(connection.sock, server_hostname=parts.hostname)
        return connection

    def _read(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, deadline: float) -> bytes:
        content = bytearray()
        while True:
            if connection.sock is not None:  # the response keeps it open where the connection has let go of it
                connection.sock.settimeout(_left(deadline))
            _left(deadline)
            piece = answer.read1(65_536)
            if not piece:
                return bytes(content)
            content += piece
            if len(content) > self.max_bytes:
                raise ValueError(f"it has more than {self.max_bytes:,} bytes")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left

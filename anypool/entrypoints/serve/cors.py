"""Leave for browsers to call from other origins: off unless origins are named."""

from __future__ import annotations

from collections.abc import Sequence

from anypool.entrypoints.serve.exchange import Answer, Exchange

_METHODS = "GET, POST, HEAD, OPTIONS"
_HEADERS = "Authorization, Content-Type, X-API-Key, X-Request-Id, X-Request-Timeout"
_EXPOSED = (
    "x-request-id, x-total-time, x-tokenization-time, x-queue-time, x-inference-time, x-compute-tokens, "
    "x-truncated-tokens, retry-after, metadata"
)


class Cors:
    """What browsers are told.

    Args:
        origins: Those that may call; "*" for all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def preflight(self, exchange: Exchange) -> Answer | None:
        """The answer to a browser that asks whether it may call; None where it is another request."""
        if exchange.method != "OPTIONS" or exchange.header(b"access-control-request-method") is None:
            return None
        if not self._allows(exchange):
            return None
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": _HEADERS,
            "access-control-max-age": "600",
        }
        return Answer(status=204, headers=headers)

    def allow(self, exchange: Exchange, answer: Answer) -> None:
        """Adds to an answer that the page which asked may read it."""
        if not self._origins:
            return
        if "*" not in self._origins:
            answer.headers["vary"] = "Origin"
        if self._allows(exchange):
            answer.headers["access-control-allow-origin"] = "*" if "*" in self._origins else self._origin(exchange)
            answer.headers["access-control-expose-headers"] = _EXPOSED

    def _allows(self, exchange: Exchange) -> bool:
        origin = exchange.header(b"origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)

    def _origin(self, exchange: Exchange) -> str:
        return exchange.header(b"origin") or ""

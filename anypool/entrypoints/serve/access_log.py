"""A line per request, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone

import orjson

from anypool.entrypoints.serve.exchange import Exchange

logger = logging.getLogger("anypool.access")


class AccessLog:
    """Writes to the logger `anypool.access`.

    Args:
        form: "text" or "json".
    """

    def __init__(self, form: str) -> None:
        self._as_json = form == "json"

    def write(self, exchange: Exchange, status: int) -> None:
        """Notes a request that has its answer."""
        request = exchange.request
        fields = {
            "request_id": exchange.request_id,
            "client": request.client.host if request.client else None,
            "method": request.method,
            "path": exchange.path,
            "status": status,
            "ms": round(1000 * (time.perf_counter() - exchange.began), 3),
            "model": exchange.model,
            "inputs": exchange.inputs,
            "tokens": exchange.tokens,
        }
        if self._as_json:  # the formatter writes these fields
            logger.info("request", extra={"fields": fields})
        else:
            said = (f"{name}={_quoted(value)}" for name, value in fields.items() if value not in (None, ""))
            logger.info("%s", " ".join(said))


def _quoted(value: object) -> str:
    """A value as it is, or in quotes where it has what could pass for a further field or line."""
    text = str(value)
    return text if text.isprintable() and not set(text) & {" ", "=", '"'} else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """Log records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode("utf-8", "replace")

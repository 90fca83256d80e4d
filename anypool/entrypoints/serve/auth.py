"""API keys: from flags and a file, which is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from anypool.config import require
from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.errors import ConfigError

logger = logging.getLogger(__name__)

# Seconds between two looks at the file.
_LOOK_EVERY_S = 1.0


class Keys:
    """The keys that clients may send. Where there are none, everybody may call.

    Args:
        given: Keys from flags.
        path: A file with one key per line; empty lines and those that begin with # are passed over.

    Raises:
        ConfigError: The file holds no key, or is not text.
        OSError: The file cannot be read.
    """

    def __init__(self, given: Sequence[str] = (), path: str | None = None) -> None:
        self._given = tuple(map(_digest, given))
        self._path = None if path is None else Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._from_file: tuple[bytes, ...] = ()
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._from_file = _read(self._path)

    @property
    def are_needed(self) -> bool:
        return bool(self._given) or self._path is not None

    def check(self, authorization: str | None, other: str | None = None) -> None:
        """Refuses a request without a key.

        Args:
            authorization: Its Authorization header.
            other: Its X-API-Key header.

        Raises:
            HTTPError: The key is missing, or is none of ours.
        """
        if not self.are_needed:
            return
        scheme, _, token = (authorization or "").partition(" ")
        sent = token.strip() if scheme.lower() == "bearer" else other
        if not sent:
            raise _refusal("the API key is missing: send it as 'Authorization: Bearer KEY'", "missing_api_key")
        if not self._is_known(sent):
            raise _refusal("the API key is not valid", "invalid_api_key")

    def _is_known(self, sent: str) -> bool:
        """Compares with every key, whatever the first ones say, so that the time tells nothing."""
        self._look()
        digest = _digest(sent.encode("latin-1").decode("utf-8", "surrogateescape"))  # headers are bytes
        found = False
        for known in (*self._given, *self._from_file):
            found |= hmac.compare_digest(digest, known)
        return found

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._from_file = _read(self._path)
                self._stamp = stamp
                logger.info("read %d API keys", len(self._from_file))
        except (OSError, ValueError) as error:  # the keys that were there stay
            logger.error("the API key file cannot be read, and its last keys stay: %s", error)


def _refusal(message: str, code: str) -> HTTPError:
    return HTTPError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    require(bool(keys), f"{path} holds no API key")
    return tuple(map(_digest, keys))

"""Which adapters requests may name: each read once, and again when its files have changed."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anypool.config import LoRARequest
from anypool.engine.request import Request
from anypool.errors import InvalidParameterError
from anypool.model_executor.weights.repository import Repository

# Each file of an adapter, the time of its last change, and its size.
Files = tuple[tuple[Path, int, int], ...]
_SUFFIXES = (".json", ".safetensors", ".bin")


@dataclass(frozen=True, eq=False)
class KnownAdapter:
    """An adapter that has been read once and fits the model.

    Attributes:
        request: What the caller calls it.
        number: Of this content of its files. No other content ever has it, so what is cached under it is never stale.
        files: These, as they were when it was read.
        is_task: Whether it is the checkpoint's own, for one of its tasks.
    """

    request: LoRARequest
    number: int
    files: Files = field(repr=False)
    is_task: bool = False


class KnownAdapters(ABC):
    """The adapters that requests of an engine may name. All methods may be called from any thread.

    Args:
        cache_dir: Where downloads are kept.
        tasks: The checkpoint's own adapters, which are always in memory. Their numbers are the first ones.
        takes_more: Whether requests may name others than these.

    Attributes:
        takes_more: The same.
    """

    def __init__(self, *, cache_dir: str | None = None, tasks: Iterable[str] = (), takes_more: bool = True) -> None:
        self._cache_dir, self.takes_more = cache_dir, takes_more
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._known: dict[int, KnownAdapter] = {}
        self._numbers = itertools.count(1)
        numbered = ((task, next(self._numbers)) for task in tasks)
        self._tasks = {
            task: KnownAdapter(LoRARequest(task, number, task), number, (), is_task=True) for task, number in numbered
        }

    @property
    def requests(self) -> tuple[LoRARequest, ...]:
        """The adapters that are known, in the order in which they came."""
        with self._lock:
            return tuple(known.request for known in self._known.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call an adapter."""
        return (*self._tasks, *(request.lora_name for request in self.requests))

    def task(self, name: str) -> KnownAdapter | None:
        """The checkpoint's own adapter for a task; None where it has none of that name."""
        return self._tasks.get(name)

    def find(self, name: str) -> LoRARequest | None:
        """The known adapter of a name."""
        return next((request for request in self.requests if request.lora_name == name), None)

    def add(self, request: LoRARequest) -> KnownAdapter:
        """Reads an adapter, unless it is known already and its files are as they were.

        Raises:
            ModelLoadError: It cannot be found or read, does not fit the model, or can only be merged.
            InvalidParameterError: Another adapter has its id, or none but those of tasks are taken.
        """
        if not self.takes_more:
            raise _not_enabled(request)
        with self._lock:
            known = self._known.get(request.lora_int_id)
            if known is not None:
                _refuse_another(request, known.request)
                if self._has(known) and known.files == _files(file for file, _, _ in known.files):
                    return known
        with self._reading:
            return self._read_anew(request)

    def remove(self, lora_int_id: int) -> LoRARequest | None:
        """Forgets an adapter. Its id may be given to another then. None where there is none of that id."""
        with self._lock:
            known = self._known.pop(lora_int_id, None)
            if known is None:
                return None
            self._forget(known)
            return known.request

    def _read_anew(self, request: LoRARequest) -> KnownAdapter:
        """Reads an adapter; one whose files have changed since becomes another one."""
        repository = Repository.open(request.lora_path, cache_dir=self._cache_dir)
        files = _files(sorted(repository.folder.rglob("*")))  # before they are read
        read = KnownAdapter(request, next(self._numbers), files)
        content = self._read(read, repository)
        with self._lock:
            known = self._known.get(request.lora_int_id)
            if known is not None:
                _refuse_another(request, known.request)
            if known is None or known.files != files:
                known = self._known[request.lora_int_id] = read
            self._keep(known, content)
            return known

    @abstractmethod
    def _read(self, known: KnownAdapter, repository: Repository) -> Any:
        """Reads an adapter's files, or raises why it cannot be used here."""

    @abstractmethod
    def _has(self, known: KnownAdapter) -> bool:
        """Whether what was read of a known adapter is still here."""

    @abstractmethod
    def _keep(self, known: KnownAdapter, content: Any) -> None:
        """Keeps what was read."""

    @abstractmethod
    def _forget(self, known: KnownAdapter) -> None:
        """Nobody can name it any more."""


def find_adapters(manager: KnownAdapters | None, asked: Any, count: int) -> list[KnownAdapter | None]:
    """The adapter of each of so many prompts.

    Args:
        manager: The adapters of the engine; None where it takes none.
        asked: `PromptOptions.lora_request`.
        count: How many prompts there are.

    Raises:
        InvalidParameterError: It is none, or the engine takes none.
        ModelLoadError: An adapter cannot be found or read, or does not fit the model.
    """
    each = list(asked) if isinstance(asked, (list, tuple)) else [asked] * count
    if len(each) != count:
        raise InvalidParameterError(f"{len(each)} lora_request were given for {count} prompts", param="lora_request")
    if all(one is None for one in each):
        return [None] * count
    if manager is None:
        raise _not_enabled(asked)
    found: dict[LoRARequest, KnownAdapter] = {}
    adapters: list[KnownAdapter | None] = []
    for one in each:
        known = manager.task(one) if isinstance(one, str) else None
        if one is not None and known is None:
            request = _request(manager, one)
            if request not in found:
                found[request] = manager.add(request)
            known = found[request]
        adapters.append(known)
    return adapters


def _not_enabled(asked: Any) -> InvalidParameterError:
    return InvalidParameterError(
        f"lora_request={asked!r:.200}: this engine was started without enable_lora=True", param="lora_request"
    )


def _request(manager: KnownAdapters, asked: Any) -> LoRARequest:
    if isinstance(asked, LoRARequest):
        return asked
    known = manager.find(asked) if isinstance(asked, str) else None
    if known is None:
        names = ", ".join(map(repr, manager.names)) or "none"
        raise InvalidParameterError(
            f"lora_request={asked!r} is neither a LoRARequest nor the name of an adapter that is known: {names}",
            param="lora_request",
        )
    return known


def assign(requests: Iterable[Request], adapters: Sequence[KnownAdapter | None]) -> None:
    """Says which adapter each request is run with, its windows and other tasks too."""
    for request, known in zip(requests, adapters, strict=True):
        for one in (request, *request.also):
            one.lora = known
            assign(one.parts, [known] * len(one.parts))


def _refuse_another(request: LoRARequest, known: LoRARequest) -> None:
    if request != known:
        raise InvalidParameterError(
            f"lora_int_id={request.lora_int_id} is the adapter {known.lora_name!r} of {known.lora_path}: give "
            f"{request.lora_name!r} of {request.lora_path} an id of its own",
            param="lora_request",
        )


def _files(paths: Iterable[Path]) -> Files:
    """Times and sizes of files that an adapter is made of; those that are gone are left out."""
    found = []
    for path in paths:
        if path.suffix in _SUFFIXES:
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((path, stat.st_mtime_ns, stat.st_size))
    return tuple(found)

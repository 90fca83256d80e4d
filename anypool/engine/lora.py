"""Which adapters are in memory, and for which requests: at most so many, the least recently used one goes first."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anypool.adapters.lora import FittedAdapter, LoRAModel
from anypool.adapters.peft_repository import open_adapter
from anypool.config import LoRARequest
from anypool.engine.request import Request
from anypool.errors import InvalidParameterError, InvalidRequestError
from anypool.kernels.segmented_lora import BASE
from anypool.model_executor.weights.lora import PeftAdapter
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
    """

    request: LoRARequest
    number: int
    files: Files = field(repr=False)


class LoRAManager:
    """The adapters of an engine. All methods but `place` may be called from any thread.

    An adapter is read by whoever prepares a request for it. The device thread only copies it into a slot, but where its
    slot was needed for others meanwhile: then it reads it again.

    Args:
        model: The model, with its slots.
        cache_dir: Where downloads are kept.
    """

    def __init__(self, model: LoRAModel, *, cache_dir: str | None = None) -> None:
        self._model, self._cache_dir = model, cache_dir
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._known: dict[int, KnownAdapter] = {}
        self._numbers = itertools.count(1)
        self._read: OrderedDict[int, FittedAdapter] = OrderedDict()  # by number; not in a slot yet
        self._slots: OrderedDict[int, int] = OrderedDict()  # number -> slot, the least recently used first
        self._free = list(reversed(range(model.slots.slots)))
        self.loads = 0
        self.on_put: Callable[[int, PeftAdapter], None] = lambda slot, adapter: None  # whom to tell of a filled slot

    @property
    def requests(self) -> tuple[LoRARequest, ...]:
        """The adapters that are known, in the order in which they came."""
        with self._lock:
            return tuple(known.request for known in self._known.values())

    @property
    def resident(self) -> tuple[LoRARequest, ...]:
        """The adapters that are in slots, the least recently used first."""
        with self._lock:
            by_number = {known.number: known.request for known in self._known.values()}
            return tuple(by_number[number] for number in self._slots if number in by_number)

    def find(self, name: str) -> LoRARequest | None:
        """The known adapter of a name."""
        return next((request for request in self.requests if request.lora_name == name), None)

    def add(self, request: LoRARequest) -> KnownAdapter:
        """Reads an adapter, unless it is known already and its files are as they were.

        Raises:
            ModelLoadError: It cannot be found or read, does not fit the model, or can only be merged.
            InvalidParameterError: Another adapter has its id.
        """
        with self._lock:
            known = self._known.get(request.lora_int_id)
            if known is not None:
                _refuse_another(request, known.request)
                is_here = known.number in self._slots or known.number in self._read
                if is_here and known.files == _files(file for file, _, _ in known.files):
                    return known
        with self._reading:
            return self._read_anew(request)

    def remove(self, lora_int_id: int) -> LoRARequest | None:
        """Forgets an adapter. Its id may be given to another then. None where there is none of that id."""
        with self._lock:
            known = self._known.pop(lora_int_id, None)
            if known is None:
                return None
            self._read.pop(known.number, None)
            return known.request

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Splits requests into batches that the slots have room for, those of one adapter next to each other.

        A model that cannot run several adapters at once gets one for each.
        """
        by_number: dict[int, list[Request]] = {}
        for request in requests:
            by_number.setdefault(0 if request.lora is None else request.lora.number, []).append(request)
        if not self._model.mixes:
            return list(by_number.values())
        of_none, room = by_number.pop(0, []), self._model.slots.slots
        others = [by_number[number] for number in sorted(by_number)]
        found = [list(itertools.chain(*others[i : i + room])) for i in range(0, len(others), room)]
        return [of_none + found[0], *found[1:]] if found else [of_none]

    def place(self, requests: Sequence[Request]) -> list[int]:
        """The slot of each request's adapter, on the device thread, which puts there what is not.

        Args:
            requests: The next batch. Those of the batch before have ended.
        """
        needed = {request.lora.number: request.lora for request in requests if request.lora is not None}
        for number, known in needed.items():
            with self._lock:
                if number in self._slots:
                    self._slots.move_to_end(number)
                    continue
                fitted = self._read.pop(number, None)
            fitted = fitted or self._read_again(known)
            slot = self._slot(needed)
            self._model.put(slot, fitted)
            self.on_put(slot, fitted.adapter)
            with self._lock:
                self._slots[number] = slot
                self.loads += 1
        return [BASE if request.lora is None else self._slots[request.lora.number] for request in requests]

    def _slot(self, needed: Collection[int]) -> int:
        """A free slot, or that of the least recently used adapter that the batch does not need."""
        with self._lock:
            if self._free:
                return self._free.pop()
            oldest = next(number for number in self._slots if number not in needed)
            return self._slots.pop(oldest)

    def _read_anew(self, request: LoRARequest) -> KnownAdapter:
        """Reads an adapter; one whose files have changed since becomes another one."""
        repository = Repository.open(request.lora_path, cache_dir=self._cache_dir)
        files = _files(sorted(repository.folder.rglob("*")))  # before they are read
        fitted = self._model.fit(open_adapter(repository))
        with self._lock:
            known = self._known.get(request.lora_int_id)
            if known is not None:
                _refuse_another(request, known.request)
            if known is None or known.files != files:
                known = KnownAdapter(request, next(self._numbers), files)
                self._known[request.lora_int_id] = known
            if known.number not in self._slots:
                self._keep(known, fitted)
            return known

    def _read_again(self, known: KnownAdapter) -> FittedAdapter:
        """Reads an adapter whose slot was needed for another while a request waited for it."""
        with self._reading:
            now = self._read_anew(known.request) if self._known.get(known.request.lora_int_id) is known else None
        if now is not known:
            raise InvalidRequestError(
                f"the adapter {known.request.lora_name!r} of {known.request.lora_path} was removed, or its files were "
                "changed, while a request waited for it: send it again",
                param="lora_request",
            )
        with self._lock:
            return self._read.pop(known.number)

    def _keep(self, known: KnownAdapter, fitted: FittedAdapter) -> None:
        """Keeps what was read until it is put into a slot; of adapters that nobody asks for after all, only some."""
        self._read[known.number] = fitted
        while len(self._read) > self._model.slots.slots:
            self._read.popitem(last=False)


def find_adapters(manager: LoRAManager | None, asked: Any, count: int) -> list[KnownAdapter | None]:
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
        raise InvalidParameterError(
            f"lora_request={asked!r:.200}: this engine was started without enable_lora=True", param="lora_request"
        )
    found: dict[LoRARequest | None, KnownAdapter | None] = {None: None}
    requests = [_request(manager, one) for one in each]
    for request in requests:
        if request is not None and request not in found:
            found[request] = manager.add(request)
    return [found[request] for request in requests]


def _request(manager: LoRAManager, asked: Any) -> LoRARequest | None:
    if asked is None or isinstance(asked, LoRARequest):
        return asked
    known = manager.find(asked) if isinstance(asked, str) else None
    if known is None:
        names = ", ".join(repr(request.lora_name) for request in manager.requests) or "none"
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

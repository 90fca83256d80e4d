"""Which adapters are in memory, and for which requests: at most so many, the least recently used one goes first."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from anypool.adapters.lora import FittedAdapter, LoRAModel
from anypool.adapters.peft_repository import open_adapter
from anypool.config import LoRARequest
from anypool.engine.known_adapters import KnownAdapter, KnownAdapters
from anypool.engine.request import Request
from anypool.errors import InvalidRequestError
from anypool.kernels.segmented_lora import BASE
from anypool.model_executor.weights.lora import PeftAdapter
from anypool.model_executor.weights.repository import Repository


class LoRAManager(KnownAdapters):
    """The adapters of an engine. All methods but `place` may be called from any thread.

    An adapter is read by whoever prepares a request for it. The device thread only copies it into a slot, but where its
    slot was needed for others meanwhile: then it reads it again.

    Args:
        model: The model, with its slots.
        cache_dir: Where downloads are kept.

    Attributes:
        on_put: Whom to tell of a filled slot.
    """

    def __init__(self, model: LoRAModel, *, cache_dir: str | None = None) -> None:
        room = range(len(model.tasks), model.slots.slots)
        super().__init__(cache_dir=cache_dir, tasks=model.tasks, takes_more=bool(room))
        self._model = model
        self._kept = {known.number: model.tasks[task] for task, known in self._tasks.items()}
        self._unplaced: OrderedDict[int, FittedAdapter] = OrderedDict()  # by number
        self._slots: OrderedDict[int, int] = OrderedDict()  # number -> slot, the least recently used first
        self._free, self._room = list(reversed(room)), max(1, len(room))
        self.on_put: Callable[[int, PeftAdapter], None] = lambda slot, adapter: None

    @property
    def resident(self) -> tuple[LoRARequest, ...]:
        """The adapters that are in slots, the least recently used first."""
        with self._lock:
            by_number = {known.number: known.request for known in self._known.values()}
            return tuple(by_number[number] for number in self._slots if number in by_number)

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Splits requests into batches that the slots have room for, those of one adapter next to each other.

        A model that cannot run several adapters at once gets one for each.
        """
        by_number: dict[int, list[Request]] = {}
        for request in requests:
            by_number.setdefault(0 if request.lora is None else request.lora.number, []).append(request)
        if not self._model.mixes:
            return list(by_number.values())
        without_slot = [by_number.pop(number) for number in (0, *self._kept) if number in by_number]
        first, room = list(itertools.chain(*without_slot)), self._room
        others = [by_number[number] for number in sorted(by_number)]
        found = [list(itertools.chain(*others[i : i + room])) for i in range(0, len(others), room)]
        return [first + found[0], *found[1:]] if found else [first]

    def place(self, requests: Sequence[Request]) -> list[int]:
        """The slot of each request's adapter, on the device thread, which puts there what is not.

        Args:
            requests: The next batch. Those of the batch before have ended.
        """
        adapters = [request.lora for request in requests if request.lora is not None]
        needed = {known.number: known for known in adapters if not known.is_task}
        for number, known in needed.items():
            with self._lock:
                if number in self._slots:
                    self._slots.move_to_end(number)
                    continue
                fitted = self._unplaced.pop(number, None)
            fitted = fitted or self._read_again(known)
            slot = self._slot(needed)
            self._model.put(slot, fitted)
            self.on_put(slot, fitted.adapter)
            with self._lock:
                self._slots[number] = slot
        slots = {**self._slots, **self._kept}
        return [BASE if request.lora is None else slots[request.lora.number] for request in requests]

    def _slot(self, needed: Collection[int]) -> int:
        """A free slot, or that of the least recently used adapter that the batch does not need."""
        with self._lock:
            if self._free:
                return self._free.pop()
            oldest = next(number for number in self._slots if number not in needed)
            return self._slots.pop(oldest)

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
            return self._unplaced.pop(known.number)

    def _read(self, known: KnownAdapter, repository: Repository) -> FittedAdapter:
        return self._model.fit(open_adapter(repository))

    def _has(self, known: KnownAdapter) -> bool:
        return known.number in self._slots or known.number in self._unplaced

    def _keep(self, known: KnownAdapter, content: FittedAdapter) -> None:
        """Keeps what was read until it is put into a slot; of adapters that nobody asks for after all, only some."""
        if known.number in self._slots:
            return
        self._unplaced[known.number] = content
        while len(self._unplaced) > self._model.slots.slots:
            self._unplaced.popitem(last=False)

    def _forget(self, known: KnownAdapter) -> None:
        self._unplaced.pop(known.number, None)

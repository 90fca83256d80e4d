"""LoRA adapters over replicas: the front knows which there are, and each replica reads what its requests name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from anypool.config import LoRARequest
from anypool.engine.known_adapters import KnownAdapter, KnownAdapters
from anypool.engine.request import Request
from anypool.errors import InvalidRequestError
from anypool.model_executor.weights.repository import Repository

# Adapters that a replica remembers having read, those used last. One that is forgotten is read again.
_MOST = 1024


class FrontAdapters(KnownAdapters):
    """The adapters that requests may name, each read by a replica first.

    Args:
        check: Has a replica read one, and raises why it cannot.
        **how: As `KnownAdapters` has them.
    """

    def __init__(self, check: Callable[[KnownAdapter], None], **how: Any) -> None:
        super().__init__(**how)
        self._check = check

    def _read(self, known: KnownAdapter, repository: Repository) -> None:
        self._check(known)

    def _has(self, known: KnownAdapter) -> bool:
        return True

    def _keep(self, known: KnownAdapter, content: None) -> None:
        pass  # replicas do

    def _forget(self, known: KnownAdapter) -> None:
        pass  # nobody names it any more, so its slots are the next to be given to others


class ReplicaAdapters:
    """The front's adapters as a replica's engine knows them: under the front's numbers, of which none comes twice.

    Args:
        adapters: The engine's; None where it takes none.
    """

    def __init__(self, adapters: KnownAdapters | None) -> None:
        self._adapters = adapters
        self._lock = threading.Lock()
        self._read: OrderedDict[int, KnownAdapter] = OrderedDict()  # by the front's numbers, the last used one last

    def are_read_for(self, request: Request) -> bool:
        """Whether `assign` has nothing to read."""
        return request.lora is None or request.lora.is_task or request.lora.number in self._read

    def assign(self, request: Request) -> None:
        """Gives a request from the front this engine's own adapter, for all that it asks.

        Raises:
            ModelLoadError: It cannot be found or read, or does not fit the model.
            InvalidRequestError: Its files are not what they were.
        """
        if request.lora is not None:
            own = self.read(request.lora)
            for one in (request, *request.also):
                one.lora = own

    def read(self, known: KnownAdapter) -> KnownAdapter:
        """Reads an adapter on its first use; errors as for `assign`."""
        assert self._adapters is not None, "the front was started with enable_lora as well"
        own = self._adapters.task(known.request.lora_name) if known.is_task else self._find(known.number)
        if own is not None:
            return own
        asked = known.request
        own = self._adapters.add(LoRARequest(asked.lora_name, known.number, asked.lora_path))
        if own.files != known.files:
            self._adapters.remove(known.number)
            raise InvalidRequestError(
                f"the files of the adapter {asked.lora_name!r} of {asked.lora_path} were changed while a request "
                "waited for it: send it again",
                param="lora_request",
            )
        with self._lock:
            self._read[known.number] = own
            if len(self._read) > _MOST:
                number, _ = self._read.popitem(last=False)
                self._adapters.remove(number)
        return own

    def _find(self, number: int) -> KnownAdapter | None:
        with self._lock:
            if number in self._read:
                self._read.move_to_end(number)
            return self._read.get(number)

"""What the processes of one engine tell each other, and how it is written into a pipe."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anypool.adapters.heads import HeadRecipe
from anypool.config import EngineConfig
from anypool.errors import EngineError
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.pooling_model_runner import RunnerOutput
from anypool.model_executor.rank import Work
from anypool.model_executor.weights.lora import PeftAdapter


@dataclass(frozen=True)
class Begin:
    """To a new process: which rank it is, what it loads, and what its caller has registered."""

    rank: int
    config: EngineConfig
    models: Mapping[str, str]
    heads: Mapping[str, HeadRecipe]


@dataclass(frozen=True)
class Join:
    """Meet the other ranks at an address."""

    address: str


@dataclass(frozen=True)
class Store:
    """Have a store for keys and values of so many blocks."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class Launch:
    """Run a part of a forward pass."""

    number: int
    work: Work


@dataclass(frozen=True)
class PutAdapter:
    """Put a rank's part of a LoRA adapter into a slot, before what is launched next."""

    slot: int
    adapter: PeftAdapter


@dataclass(frozen=True)
class ForgetChunks:
    """Free what a long prompt left."""


@dataclass(frozen=True)
class FreeMemory:
    """Give back what can be made again."""


@dataclass(frozen=True)
class Stop:
    """End."""


Command = Begin | Join | Store | Launch | PutAdapter | ForgetChunks | FreeMemory | Stop


@dataclass(frozen=True)
class Ready:
    """The process has started, and waits to join the others."""


@dataclass(frozen=True)
class Alive:
    """The process has not stopped, whatever it is at."""


@dataclass(frozen=True)
class Loaded:
    """The rank has its part of the model."""


@dataclass(frozen=True)
class NotLoaded:
    """The rank could not load its part."""

    error: Exception


@dataclass(frozen=True)
class Ran:
    """A forward pass has ended: with results on the rank that makes them, or with an error."""

    number: int
    output: RunnerOutput | None = None
    error: Exception | None = None


Report = Ready | Alive | Loaded | NotLoaded | Ran


def dumps(message: Command | Report) -> bytes:
    """A message as bytes. Tensors go to the host; a key-value store stays behind, since each rank has its own."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """The message again."""
    return pickle.loads(data)


def sendable(error: Exception) -> Exception:
    """An error that another process can read: itself, or one with its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever it holds or takes to be built
        return EngineError(f"{type(error).__name__}: {error}")
    return error


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes, which is faster than torch's own way for many small ones."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(data.data), value.dtype, tuple(value.shape))
        if isinstance(value, KVStore):
            return _nothing, ()
        return NotImplemented


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _nothing() -> None:
    return None

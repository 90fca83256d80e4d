"""What the front and its replicas say to each other: pickles in frames, and results as the bytes of their tensors."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from anypool.adapters.facts import Elsewhere
from anypool.adapters.heads import HeadRecipe
from anypool.adapters.load import LoadedModel
from anypool.config import EngineConfig
from anypool.engine.health import Health
from anypool.engine.known_adapters import KnownAdapter
from anypool.engine.metrics import Counts
from anypool.engine.request import Request
from anypool.engine.tokenization import Tokenizer
from anypool.errors import AnypoolError, EngineError
from anypool.pooling.plan import PoolingPlan

_SIZES = struct.Struct("<QQ")  # of a message, and of the bytes after it


@dataclass(frozen=True, kw_only=True)
class Setup:
    """To a replica: what it is.

    Attributes:
        config: What it loads and how.
        threads: How many threads it computes with at most; None for torch's choice.
        models, heads: What the user has registered, by architecture.
        is_first: Whether it tells what it has loaded, and logs what there is to say about that, for all of them.
    """

    config: EngineConfig
    threads: int | None
    models: Mapping[str, str]
    heads: Mapping[str, HeadRecipe]
    is_first: bool


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From a replica: it is loaded. The first one says what; modules are left out of that."""

    config: EngineConfig
    loaded: LoadedModel | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Failed:
    """From a replica: it cannot be loaded."""

    error: Exception


@dataclass(frozen=True)
class Said:
    """From a replica: a line for the log."""

    logger: str
    level: int
    message: str


@dataclass(frozen=True)
class Alive:
    """From a replica, now and then: it has not stopped, whatever it is at."""


class Sent(NamedTuple):
    """To a replica: a request under a number of the replica's own.

    Attributes:
        also: What else the same run answers.
        turn: Priority, deadline and cache salt, which requests of one call share.
        fields: Of the request, in the order of `SENT_FIELDS`.
    """

    number: int
    also: tuple[PoolingPlan, ...]
    turn: tuple[int, float | None, str | None]
    fields: tuple[Any, ...]


@dataclass(frozen=True)
class Work:
    """To a replica: requests to run, numbers of requests that nobody waits for any more, and questions."""

    requests: Sequence[Sent] = ()
    cancelled: Sequence[int] = ()
    questions: Sequence[Question] = ()


class Question(NamedTuple):
    """To a replica: whether a LoRA adapter can be read and fits the model."""

    number: int
    adapter: KnownAdapter


class Answer(NamedTuple):
    """From a replica: the error that reading the adapter ended with, as `pack_error` makes it; None where it fits."""

    number: int
    error: bytes | None


class Ended(NamedTuple):
    """From a replica: what became of a request. Cancelled where there is neither a result nor an error.

    Attributes:
        started: When its first forward pass began.
        cached: Tokens whose keys were read from the prefix cache.
        results: Shapes and dtypes of its results, whose bytes come after the message; None where it has none.
        error: Its error as `pack_error` makes it.
    """

    number: int
    started: float
    cached: int
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...] | None = None
    error: bytes | None = None


@dataclass(frozen=True)
class Report:
    """From a replica: which requests have ended, how it is, and what it has counted since it last said so."""

    ended: Sequence[Ended]
    health: Health
    counts: Counts


# What a request is when it arrives. Its turn and its tasks go beside it, and all else is decided where it runs.
SENT_FIELDS = (
    "request_id",
    "token_ids",
    "plan",
    "token_type_ids",
    "images",
    "skip",
    "num_keys",
    "num_truncated_tokens",
    "lora",
)


def pack_request(number: int, request: Request) -> Sent:
    return Sent(
        number,
        tuple(one.plan for one in request.also),
        (request.priority, request.deadline, request.cache_salt),
        tuple(getattr(request, name) for name in SENT_FIELDS),
    )


def unpack_request(sent: Sent) -> Request:
    fields = dict(zip(SENT_FIELDS, sent.fields, strict=True))
    also = tuple(Request(**{**fields, "plan": plan}) for plan in sent.also)
    return Request(**fields, also=also)


def pack_results(results: Iterable[torch.Tensor]) -> list[memoryview]:
    """The bytes of tensors on the host."""
    return [one.contiguous().reshape(-1).view(torch.uint8).numpy().data for one in results]


def unpack_results(ended: Iterable[Ended], content: bytearray) -> Iterator[list[torch.Tensor]]:
    """The results of each request that has some, each in memory of its own."""
    at = 0
    for one in ended:
        if one.results is None:
            continue
        results = []
        for shape, dtype in one.results:
            result = torch.empty(shape, dtype=dtype)
            if count := result.numel():
                result.view(-1).copy_(torch.frombuffer(content, dtype=dtype, count=count, offset=at))
            at += count * dtype.itemsize
            results.append(result)
        yield results


def pack_error(error: Exception) -> bytes:
    """An error with its cause, as far as they can be pickled. An error of another kind is told as an `EngineError`."""
    cause = error.__cause__
    for pair in ((error, cause), (EngineError(str(error)), RuntimeError(repr(cause)) if cause is not None else None)):
        try:
            packed = pickle.dumps(pair)
            pickle.loads(packed)
        except Exception:  # anything that an exception of a third party may raise there
            continue
        return packed
    raise AssertionError("plain errors can be pickled")


def unpack_error(packed: bytes) -> Exception:
    error, cause = pickle.loads(packed)
    error.__cause__ = cause
    assert isinstance(error, AnypoolError)
    return error


class _WithoutModules(pickle.Pickler):
    """Leaves out the modules of a model: weights stay where they are."""

    def reducer_override(self, value: Any) -> Any:
        return (Elsewhere, ()) if isinstance(value, nn.Module) else NotImplemented


class Channel:
    """Messages over a pair of pipes. Any thread may send, one receives.

    Args:
        reader, writer: The ends of this side.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, message: object, content: Sequence[memoryview] = ()) -> None:
        """Sends a message, and bytes after it.

        Raises:
            OSError: Nobody is at the other end.
        """
        pickled = io.BytesIO()
        _WithoutModules(pickled, pickle.HIGHEST_PROTOCOL).dump(message)
        header = pickled.getbuffer()
        with self._lock:
            self._writer.write(_SIZES.pack(len(header), sum(map(len, content))))
            self._writer.write(header)
            for part in content:
                self._writer.write(part)
            self._writer.flush()

    def receive(self) -> tuple[Any, bytearray]:
        """The next message, and the bytes after it.

        Raises:
            EOFError: Nobody is at the other end.
        """
        header, content = _SIZES.unpack(self._read(_SIZES.size))
        return pickle.loads(self._read(header)), self._read(content)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if size and self._reader.readinto(data) != size:  # type: ignore[attr-defined]
            raise EOFError
        return data

    def close_writer(self) -> None:
        """Tells the other end that nothing comes any more."""
        with self._lock, contextlib.suppress(OSError):  # what was still to be written cannot be
            self._writer.close()

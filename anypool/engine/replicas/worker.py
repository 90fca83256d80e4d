"""What runs in a replica's process: an engine, fed through a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from anypool.adapters.heads import register_head
from anypool.engine.engine import Engine
from anypool.engine.metrics import Counts
from anypool.engine.patience import LOOK_S
from anypool.engine.replicas.adapters import ReplicaAdapters
from anypool.engine.replicas.wire import (
    Alive,
    Answer,
    Channel,
    Ended,
    Failed,
    Question,
    Ready,
    Report,
    Said,
    Setup,
    Work,
    pack_error,
    pack_results,
    unpack_error,
    unpack_request,
)
from anypool.engine.request import Request
from anypool.errors import AnypoolError, EngineDeadError, EngineError
from anypool.model_executor.registry import register_model

# Exit codes: the front has gone, the engine has died.
_ORPHANED, _DEAD = 0, 1


def main() -> None:
    """Loads what the front asks for and serves it until the front has gone, however that ended."""
    front = os.getppid()
    channel = _own_pipes()
    threading.Thread(target=_say_that_it_lives, args=(channel, front), name="anypool-alive", daemon=True).start()
    try:
        setup: Setup = channel.receive()[0]
        _forward_log(channel, logging.INFO if setup.is_first else logging.ERROR)
        engine = _load(setup)
        ready = Ready(config=engine.config)
        if setup.is_first:
            ready = Ready(config=engine.config, loaded=replace(engine.loaded, lora=None), tokenizer=engine.tokenizer)
        channel.send(ready)
    except (EOFError, OSError):
        os._exit(_ORPHANED)
    except Exception as error:  # whatever it is, the front raises it
        channel.send(Failed(unpack_error(pack_error(_as_ours(error, "be loaded")))))
        os._exit(_DEAD)
    logging.getLogger("anypool").setLevel(logging.INFO)
    Worker(engine, channel).run()


def _say_that_it_lives(channel: Channel, front: int) -> None:
    """Tells the front so, and ends the process when there is none any more."""
    with contextlib.suppress(OSError):
        while os.getppid() == front:  # a process that the front forked may hold its end of the pipe open
            channel.send(Alive())
            time.sleep(LOOK_S)
    os._exit(_ORPHANED)


def _own_pipes() -> Channel:
    """The pipes to the front. What libraries print goes to stderr, and they find nothing on stdin."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(reader, writer)


def _load(setup: Setup) -> Engine:
    for architecture, model_cls in setup.models.items():
        register_model(architecture, model_cls)
    for architecture, recipe in setup.heads.items():
        register_head(architecture, recipe)
    if setup.threads is not None and setup.threads < torch.get_num_threads():
        torch.set_num_threads(setup.threads)
    return Engine(setup.config)


def _as_ours(error: Exception, what: str) -> AnypoolError:
    if isinstance(error, AnypoolError):
        return error
    failure = EngineError(f"a replica cannot {what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _forward_log(channel: Channel, level: int) -> None:
    """Has the front log what this process has to say."""
    logger = logging.getLogger("anypool")
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(_Forwarding(channel))


class _Forwarding(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the front has gone
            self._channel.send(Said(record.name, record.levelno, self.format(record)))


class Worker:
    """Between the pipe and the engine.

    Args:
        engine: What runs requests.
        channel: To the front.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._requests: dict[int, Request] = {}
        self._ended: list[tuple[int, Request]] = []
        self._changed = threading.Condition()
        self._counts: Counts = {}
        self._adapters = ReplicaAdapters(engine.lora)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="anypool-adapters")  # others do not wait for it

    def run(self) -> None:
        """Takes work until the front has gone."""
        threading.Thread(target=self._report_or_exit, name="anypool-report", daemon=True).start()
        try:
            while True:
                self._take(self._channel.receive()[0])
        except EOFError:
            os._exit(_ORPHANED)
        except EngineDeadError:
            os._exit(_DEAD)

    def _take(self, work: Work) -> None:
        with self._engine.together():
            for turn, group in groupby(work.requests, attrgetter("turn")):
                at_once: list[Request] = []
                later: list[Request] = []
                for sent in group:
                    request = unpack_request(sent)
                    self._requests[sent.number] = request
                    request.future.add_done_callback(partial(self._end, sent.number, request))
                    (at_once if self._adapters.are_read_for(request) else later).append(request)
                self._submit(at_once, turn)
                if later:
                    self._reader.submit(self._submit, later, turn)
        for question in work.questions:
            self._reader.submit(self._answer, question)
        for number in work.cancelled:
            if (cancelled := self._requests.get(number)) is not None:  # else it has ended meanwhile
                cancelled.future.cancel()

    def _submit(self, requests: Sequence[Request], turn: tuple[int, float | None, str | None]) -> None:
        """Queues requests, with the adapters that they name; those whose adapter cannot be read get its error."""
        priority, deadline, salt = turn
        ready = []
        for request in requests:
            try:
                self._adapters.assign(request)
            except Exception as error:  # as in `main`
                request.fail(_as_ours(error, "read an adapter"))
            else:
                ready.append(request)
        timeout_s = None if deadline is None else deadline - time.monotonic()  # a clock of the whole machine
        try:
            self._engine.submit(ready, priority=priority, timeout_s=timeout_s, cache_salt=salt)
        except EngineDeadError as error:  # the report says so, and the front has another replica run them
            for request in ready:
                request.fail(error)

    def _answer(self, question: Question) -> None:
        error = None
        try:
            self._adapters.read(question.adapter)
        except Exception as raised:  # as in `main`
            error = pack_error(_as_ours(raised, "read an adapter"))
        with contextlib.suppress(OSError):  # the front has gone
            self._channel.send(Answer(question.number, error))

    def _end(self, number: int, request: Request, future: Any) -> None:
        """A request has its answer: on the device thread, or on the one that cancels it."""
        with self._changed:
            del self._requests[number]
            self._ended.append((number, request))
            if len(self._ended) == 1:
                self._changed.notify()

    def _report_or_exit(self) -> None:
        try:
            self._report()
        except BaseException as error:  # without reports the front would wait for ever
            if not isinstance(error, OSError):
                logging.getLogger(__name__).exception("a replica cannot report")
        os._exit(_DEAD)

    def _report(self) -> None:
        """Tells the front what has ended, all that has gathered meanwhile in one message."""
        while True:
            with self._changed:
                if not self._ended:
                    self._changed.wait(LOOK_S)
                gathered, self._ended = self._ended, []
                is_idle = not gathered and not self._requests
            is_dead = not self._engine.is_alive
            if is_dead:  # the front has another replica run what this one could not
                gathered = [(number, one) for number, one in gathered if not _died_with_engine(one)]
            if not is_idle:
                self._send(gathered)
            if is_dead:
                sys.stderr.flush()
                return

    def _send(self, gathered: list[tuple[int, Request]]) -> None:
        ended, content = [], []
        for number, request in gathered:
            results, error = None, None
            if not request.future.cancelled():
                failure = request.future.exception()
                if failure is None:
                    content += pack_results(request.results)
                    results = tuple((tuple(one.shape), one.dtype) for one in request.results)
                else:
                    assert isinstance(failure, AnypoolError)
                    error = pack_error(failure)
            ended.append(Ended(number, request.started, request.num_cached_tokens, results, error))
        counts = self._engine.metrics.run_counts()
        new = {
            name: [now - before for now, before in zip(values, self._counts.get(name, [0] * len(values)), strict=True)]
            for name, values in counts.items()
        }
        self._counts = counts
        self._channel.send(Report(ended, self._engine.health(), new), content)


def _died_with_engine(request: Request) -> bool:
    future = request.future
    return not future.cancelled() and isinstance(future.exception(), EngineDeadError)

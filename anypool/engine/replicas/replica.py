"""One replica as the front sees it: what it is running, and its life from start to restart."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from anypool.engine.health import Health
from anypool.engine.known_adapters import KnownAdapter
from anypool.engine.replicas.process import ReplicaProcess
from anypool.engine.replicas.wire import Answer, Question, Report, pack_request, unpack_error
from anypool.engine.request import Request
from anypool.errors import EngineError

logger = logging.getLogger(__name__)

# A replica that fails to start this many times in a row is given up.
MOST_STARTS = 3
# One that lived at least so many seconds is started again at once; others wait, each time longer, up to the last.
_SETTLED_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 0.5, 30.0


class Front(Protocol):
    """What a replica tells its front, on its own thread."""

    def took(self, replica: Replica, report: Report, content: bytearray, requests: list[Request]) -> None:
        """Requests have ended, in the order of the report."""

    def lost(self, replica: Replica, reason: str) -> None:
        """It died, with what it has in flight."""


class Replica:
    """A replica, started again when it dies.

    Args:
        name: For the log.
        process: The one that is ready first.
        start: Starts another one.
        front: Whom to tell.
        changed: Held around everything that is not private, and notified when it changes.

    Attributes:
        in_flight: What it has been given and has not answered, by number.
        tokens: Of these.
        is_ready: Whether it takes requests.
        is_given_up: Whether it is not started any more.
        failure: Why it could not be started, the last time that it could not.
    """

    def __init__(
        self,
        name: str,
        process: ReplicaProcess,
        start: Callable[[], ReplicaProcess],
        front: Front,
        changed: threading.Condition,
    ) -> None:
        self.name = name
        self.in_flight: dict[int, Request] = {}
        self.tokens = 0
        self.is_ready, self.is_given_up = True, False
        self.failure: Exception | None = None
        self._process, self._start_process, self._front, self._changed = process, start, front, changed
        self._numbers = itertools.count()
        self._asked: dict[int, Future[None]] = {}
        self._health: Health | None = None
        self._pause_s = 0.0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"anypool-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_on_trial(self) -> bool:
        """Whether it runs a request that killed one before, which is to have no company."""
        return any(request.has_killed for request in itertools.islice(self.in_flight.values(), 1))

    @property
    def is_stuck(self) -> bool:
        """Whether its engine says so."""
        return bool(self.in_flight) and self._health is not None and self._health.status == "stuck"

    def send(self, requests: Sequence[Request]) -> None:
        """Gives it requests."""
        sent = []
        for request in requests:
            number = next(self._numbers)
            self.in_flight[number] = request
            self.tokens += len(request)
            sent.append(pack_request(number, request))
        process = self._process
        process.post(sent)
        for one, request in zip(sent, requests, strict=True):
            request.future.add_done_callback(partial(_pass_on, process, one.number))

    def take_back(self) -> list[Request]:
        """Takes what it had when it died."""
        with self._changed:
            requests, self.in_flight, self.tokens, self._health = list(self.in_flight.values()), {}, 0, None
        return requests

    def ask(self, adapter: KnownAdapter) -> Future[None]:
        """Has it read a LoRA adapter. The future has the error where that cannot be done."""
        asked: Future[None] = Future()
        number = next(self._numbers)
        self._asked[number] = asked
        self._process.post(questions=[Question(number, adapter)])
        return asked

    def close(self) -> None:
        """Ends it, and with it whatever it runs."""
        self._is_closing.set()
        self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _live(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._listen()
            except EOFError:
                pass
            except Exception:  # what it says cannot be read: it is of no use any more
                logger.exception("%s is ended, since its answer cannot be read", self.name)
                self._process.kill()
            with self._changed:
                self.is_ready = False
            reason = self._process.end()
            with self._changed:
                asked, self._asked = list(self._asked.values()), {}
            for future in asked:
                future.set_exception(EngineError(f"{self.name} {reason} while it was to read an adapter: try again"))
            if not self._is_closing.is_set():
                count = len(self.in_flight)
                logger.error("%s %s with %d requests; it is started again", self.name, reason, count)
            self._front.lost(self, reason)
            self._pause_s = 0.0 if time.monotonic() - began > _SETTLED_S else self._longer_pause()
            if not self._restart():
                return

    def _listen(self) -> None:
        """Passes on what it reports, until it reports no more."""
        while True:
            report, content = self._process.receive()
            if isinstance(report, Answer):
                self._take(report)
                continue
            assert isinstance(report, Report)
            with self._changed:
                self._health = report.health
                requests = [self.in_flight.pop(one.number) for one in report.ended]
                self.tokens -= sum(map(len, requests))
                self._changed.notify()
            try:
                self._front.took(self, report, content, requests)
            except Exception as error:  # nobody may be left waiting; those that have their answers keep them
                for request in requests:
                    request.fail(EngineError(f"the answer of {self.name} cannot be read: {error!r}"))
                raise

    def _take(self, answer: Answer) -> None:
        with self._changed:
            asked = self._asked.pop(answer.number)
        if answer.error is None:
            asked.set_result(None)
        else:
            asked.set_exception(unpack_error(answer.error))

    def _longer_pause(self) -> float:
        return min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _restart(self) -> bool:
        """Starts it again, after a pause; False where it is closing, or given up."""
        for _ in range(MOST_STARTS):
            if self._is_closing.wait(self._pause_s):
                return False
            try:
                self._process = self._start_process()
                if self._is_closing.is_set():  # too late for `close` to see this process
                    self._process.kill()
                self._process.wait_until_ready()
            except Exception as error:  # whatever it is, this thread has to try again, or to say that it gives up
                self._process.kill()
                self._process.end()
                if self._is_closing.is_set():
                    return False
                logger.error("%s could not be started: %s", self.name, error)
                self.failure = error
                self._pause_s = self._longer_pause()
                continue
            with self._changed:
                self.is_ready = True
                self._changed.notify()
            logger.info("%s is ready again", self.name)
            return True
        logger.error("%s is given up after %d attempts to start it", self.name, MOST_STARTS)
        with self._changed:
            self.is_given_up = True
            self._changed.notify()
        return False


def _pass_on(process: ReplicaProcess, number: int, future: Future[Any]) -> None:
    """Tells the process that nobody waits for a request any more."""
    if future.cancelled():
        process.post(cancelled=[number])

"""A replica's process, from outside."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from anypool.engine.patience import LOOK_S, START_S, AwakeClock, patience_s
from anypool.engine.replicas.wire import Alive, Channel, Failed, Question, Ready, Said, Sent, Setup, Work
from anypool.errors import EngineDeadError

# Seconds that a process gets to end by itself.
_END_S = 5.0
# Where the process may run is settled before torch is imported, which counts its threads by it. The folders to import
# from are the caller's, whatever lies in the current one.
_START = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "sys.argv[2] and os.sched_setaffinity(0, map(int, sys.argv[2].split(','))); "
    "from anypool.engine.replicas.worker import main; main()"
)


class ReplicaProcess:
    """Starts a replica. One that says nothing for `stuck_after_s`, though it can always say that it lives, is ended.

    Args:
        name: For the log.
        setup: What it is.
        cpus: Where it may run; none for anywhere.
        environment: Variables of its own.
    """

    def __init__(
        self, name: str, setup: Setup, *, cpus: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, os.pathsep.join(sys.path), ",".join(map(str, cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is the front's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)
        self._outbox: queue.SimpleQueue[Work | Setup | None] = queue.SimpleQueue()
        self._outbox.put(setup)
        self._clock = AwakeClock()
        self._patience_s = START_S
        self._patience_later_s = patience_s(setup.config.stuck_after_s)
        self._listening_since: float | None = None
        self._has_ended = threading.Event()
        self._cause: str | None = None
        threading.Thread(target=self._write, name=f"anypool-to-{name}", daemon=True).start()
        threading.Thread(target=self._watch, name=f"anypool-watch-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> Ready:
        """Waits until the replica is loaded.

        Raises:
            AnypoolError: It cannot be; as in this process.
            EngineDeadError: It died.
        """
        try:
            message = self.receive()[0]
        except EOFError:
            raise EngineDeadError(f"{self.name} {self.end()} while it was loading") from None
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Ready)
        return message

    def receive(self) -> tuple[object, bytearray]:
        """The next message for the front, and the bytes after it; EOFError where none comes any more."""
        while True:
            self._listening_since = self._clock.seconds
            try:
                message, content = self._channel.receive()
            finally:
                self._listening_since = None
            self._patience_s = self._patience_later_s
            if isinstance(message, Said):
                logging.getLogger(message.logger).log(message.level, "%s", message.message)
            elif not isinstance(message, Alive):
                return message, content

    def post(
        self, requests: Sequence[Sent] = (), cancelled: Sequence[int] = (), questions: Sequence[Question] = ()
    ) -> None:
        """Sends what there is for the replica, without waiting for it to take that."""
        self._outbox.put(Work(requests, cancelled, questions))

    def close(self) -> None:
        """Has it end when it has taken what was posted."""
        self._outbox.put(None)

    def kill(self) -> None:
        """Ends it at once."""
        if self._process.poll() is None:
            self._process.kill()

    def end(self) -> str:
        """Waits for its end, or ends it, and says how it ended."""
        self.close()
        assert self._process.stdout is not None
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._process.stdout.close()
        self._has_ended.set()
        if self._cause is not None:
            return self._cause
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _watch(self) -> None:
        """Ends the process when it says nothing to someone who listens: it is stopped, or holds a lock for ever."""
        while not self._has_ended.wait(LOOK_S):
            self._clock.tick()
            since, patience_s = self._listening_since, self._patience_s
            if since is not None and self._clock.seconds - since > patience_s:
                self._cause = f"said nothing for {patience_s:g} s and was ended"
                self.kill()
                return

    def _write(self) -> None:
        """Sends what was posted; what has gathered meanwhile goes in one message."""
        try:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, Work):
                    message, is_last = self._gather(message)
                else:
                    is_last = False
                self._channel.send(message)
                if is_last:
                    break
        except OSError:  # it has died, which whoever receives from it notices
            pass
        self._channel.close_writer()

    def _gather(self, first: Work) -> tuple[Work, bool]:
        """All work that is posted, and whether that was the last."""
        requests, cancelled, questions = list(first.requests), list(first.cancelled), list(first.questions)
        while True:
            try:
                more = self._outbox.get_nowait()
            except queue.Empty:
                return Work(requests, cancelled, questions), False
            if more is None:
                return Work(requests, cancelled, questions), True
            assert isinstance(more, Work)
            requests += more.requests
            cancelled += more.cancelled
            questions += more.questions

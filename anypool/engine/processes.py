"""The processes of the ranks beside rank 0: started, listened to, ended.

Whatever happens to one of them ends them all: none goes on without the others, and none is left behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from pathlib import Path

from anypool.adapters.heads import registered_heads
from anypool.config import EngineConfig
from anypool.engine import wire
from anypool.engine.patience import LOOK_S, START_S, AwakeClock, patience_s
from anypool.errors import EngineDeadError, EngineError
from anypool.model_executor.registry import ModelRegistry

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "anypool.engine.worker")
# Seconds that a process gets to load once rank 0 has loaded, and to end by itself.
_LOAD_S = 180.0
_END_S = 5.0


class Processes:
    """Ranks 1, 2, ... of an engine, a process each.

    Args:
        configs: What each loads, by rank; that of rank 0 is not used here.
        threads: Of torch in each, where the environment does not say.

    Attributes:
        death: Ends with the error that says why there are no ranks any more.
        on_report: Called with a rank and what it reports, in a thread of its own.
        on_death: Called with the error once a process has died, after the others were ended.
        is_overdue: Called now and then: why the ranks are to be given up, or None.
    """

    def __init__(self, configs: list[EngineConfig], *, threads: int) -> None:
        self.death: Future[None] = Future()
        self.on_report: Callable[[int, wire.Ran], None] | None = None
        self.on_death: Callable[[EngineDeadError], None] | None = None
        self.is_overdue: Callable[[], str | None] = lambda: None
        models, heads = ModelRegistry.registered_paths(), registered_heads()
        self._ready: dict[int, Future[None]] = {rank: Future() for rank in range(1, len(configs))}
        self._loaded: dict[int, Future[None]] = {rank: Future() for rank in range(1, len(configs))}
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._is_ended = False
        self._clock = AwakeClock()
        self._heard: dict[int, float] = {}
        self._patience_s = patience_s(configs[0].stuck_after_s)
        self._folder = Path(tempfile.mkdtemp(prefix="anypool-ranks-"))
        self._meetings = count()
        try:
            for rank in range(1, len(configs)):
                self._start(rank, threads)
            for rank, connection in self._connections.items():
                connection.send_bytes(wire.dumps(wire.Begin(rank, configs[rank], models, heads)))
        except BaseException:
            self.end(at_once=True)
            raise
        threading.Thread(target=self._listen, name="anypool-ranks", daemon=True).start()

    def _start(self, rank: int, threads: int) -> None:
        here, there = Pipe()
        with there:
            self._connections[rank] = here
            # A session of its own, so that Ctrl-C is rank 0's alone.
            self._processes[rank] = subprocess.Popen(
                [*_COMMAND, str(there.fileno())],
                env={
                    "OMP_NUM_THREADS": str(threads),
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )

    def address(self) -> str:
        """Where the ranks meet: a new place each time."""
        return (self._folder / str(next(self._meetings))).as_uri()

    def wait_ready(self) -> None:
        """Waits until all processes have started, or raises why they have not."""
        self._wait(self._ready, START_S, "started")

    def wait_loaded(self, own_s: float) -> None:
        """Waits until all have loaded, given the seconds that rank 0 took, or raises why they have not."""
        self._wait(self._loaded, max(_LOAD_S, 3 * own_s), "loaded its part of the model")

    def _wait(self, futures: dict[int, Future[None]], patience_s: float, what: str) -> None:
        until = time.monotonic() + patience_s
        for rank, future in futures.items():
            wait([future, self.death], max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)
            if self.death.done():
                self.death.result()
            if not future.done():
                raise EngineError(f"{self._name(rank)} has not {what} within {patience_s:.0f} s")

    def send(self, command: wire.Command) -> None:
        """Sends a command to all. A process that has died takes none, and `death` tells."""
        data = wire.dumps(command)
        with self._sending:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.send_bytes(data)

    def end(self, *, at_once: bool = False) -> None:
        """Ends all processes, by force where they do not end within seconds; returns when they are gone."""
        with self._ending:
            if not at_once and not self._is_ended:
                self.send(wire.Stop())
            self._is_ended = True
            until = time.monotonic() + (0.0 if at_once else _END_S)
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            for process in self._processes.values():
                process.kill()
                process.wait()

    def clean_up(self) -> None:
        """Removes the files over which ranks met. This process has to have left them: it would look for its own."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        """Takes what the processes report, until there are none."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while ranks and not self.death.done():
            for connection in wait_for_connections(list(ranks), LOOK_S):
                assert isinstance(connection, Connection)
                try:
                    self._take(ranks[connection], wire.loads(connection.recv_bytes()))
                except (EOFError, OSError):
                    rank = ranks.pop(connection)
                    if not self._is_ended:
                        self._die(EngineDeadError(self._obituary(rank)))
            if (reason := self._hangs() or self.is_overdue()) is not None:
                self._die(EngineDeadError(reason))
        for connection in self._connections.values():
            connection.close()

    def _hangs(self) -> str | None:
        """Says which rank hangs, if one does: it has said nothing, though it can always say that it lives."""
        self._clock.tick()
        for rank, heard in self._heard.items():
            if self._clock.seconds - heard > self._patience_s:
                return f"{self._name(rank)} hangs: it has said nothing for {self._patience_s:g} s"
        return None

    def _take(self, rank: int, report: wire.Report) -> None:
        self._heard[rank] = self._clock.seconds
        if isinstance(report, wire.Ready):
            self._ready[rank].set_result(None)
        elif isinstance(report, wire.Loaded):
            self._loaded[rank].set_result(None)
        elif isinstance(report, wire.NotLoaded):
            self._die(report.error)
        elif isinstance(report, wire.Ran) and self.on_report is not None:
            self.on_report(rank, report)

    def _die(self, error: Exception) -> None:
        if self.death.done():
            return
        self.end(at_once=True)
        self.death.set_exception(error)
        if self.on_death is not None and isinstance(error, EngineDeadError):
            self.on_death(error)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self._processes) + 1} (process {self._processes[rank].pid})"

    def _obituary(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"{self._name(rank)} has closed its connection"
        if code < 0:
            return f"{self._name(rank)} was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"{self._name(rank)} ended with exit code {code}; what it said is above, or in the log"

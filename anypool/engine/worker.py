"""A process that is one rank of an engine, started as `python -m anypool.engine.worker FD` by `anypool.engine.ranks`.

It does what comes through the pipe, in that order, and ends when the process at the other end does.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from urllib.parse import unquote, urlsplit

from anypool.adapters.heads import register_head
from anypool.adapters.lora import LoRAModel
from anypool.engine import wire
from anypool.engine.patience import LOOK_S
from anypool.engine.ranks import join, make_rank
from anypool.engine.setup import load
from anypool.model_executor.cpu import KeptMemory, set_up_threads
from anypool.model_executor.gpu_memory import cap_memory
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.rank import Rank, Work
from anypool.model_executor.registry import register_model

# Seconds in which a parent that is killed is gone after its pipes are closed.
_LAST_S = 0.2


class Worker:
    """One rank.

    Args:
        connection: To the process that has rank 0.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: SimpleQueue[wire.Command] = SimpleQueue()
        self._store: KVStore | None = None
        self._lora: LoRAModel | None = None
        self._meetings: Path | None = None
        threading.Thread(target=self._listen, args=(os.getppid(),), name="anypool-commands", daemon=True).start()

    def _listen(self, parent: int) -> None:
        """Reads commands, so that who sends them never waits, and ends the process when nobody can send any more.

        The pipe's end tells that there is no parent any more, unless a fork of it holds the pipe open.
        """
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if self._connection.poll(LOOK_S):
                    self._commands.put(wire.loads(self._connection.recv_bytes()))
        time.sleep(_LAST_S)
        if self._meetings is not None and os.getppid() != parent:  # which cannot remove it any more
            shutil.rmtree(self._meetings, ignore_errors=True)
        os._exit(1)

    def _join(self, begin: wire.Begin, command: wire.Join) -> None:
        self._meetings = Path(unquote(urlsplit(command.address).path)).parent
        join(begin.rank, begin.config, command.address)

    def _say_that_it_lives(self) -> None:
        while True:
            self._report(wire.Alive())
            time.sleep(LOOK_S)

    def _report(self, report: wire.Report) -> None:
        data = wire.dumps(report)
        with self._sending, suppress(OSError):  # nobody is there to read it: `_listen` ends the process
            self._connection.send_bytes(data)

    def serve(self) -> None:
        """Loads, then does what is asked until it is told to stop."""
        begin = self._commands.get()
        assert isinstance(begin, wire.Begin)
        try:
            rank = self._load(begin)
        except Exception as error:  # the caller's to see
            self._report(wire.NotLoaded(wire.sendable(error)))
            return
        memory = KeptMemory(rank.runner.device)
        self._report(wire.Loaded())
        while not isinstance(command := self._commands.get(), wire.Stop):
            self._do(command, begin, rank)
            memory.trim()
        rank.leave()

    def _load(self, begin: wire.Begin) -> Rank:
        for architecture, path in begin.models.items():
            register_model(architecture, path)
        for architecture, recipe in begin.heads.items():
            register_head(architecture, recipe)
        self._report(wire.Ready())
        threading.Thread(target=self._say_that_it_lives, name="anypool-alive", daemon=True).start()
        command = self._commands.get()
        assert isinstance(command, wire.Join)
        self._join(begin, command)
        _, loaded = load(begin.config)
        if loaded.device.type == "cuda":
            cap_memory(loaded.device, begin.config.gpu_memory_utilization)
        self._lora = loaded.lora
        return make_rank(loaded)

    def _do(self, command: wire.Command, begin: wire.Begin, rank: Rank) -> None:
        if isinstance(command, wire.Launch):
            outcome = rank.attempt(_with_store(command.work, self._store))
            if isinstance(outcome, Exception):
                self._report(wire.Ran(command.number, error=wire.sendable(outcome)))
            else:
                self._report(wire.Ran(command.number, output=outcome))
        elif isinstance(command, wire.Store):
            self._store = KVStore(command.num_blocks, command.block_size, rank.runner.device)
        elif isinstance(command, wire.Join):
            rank.leave()
            self._join(begin, command)
        elif isinstance(command, wire.PutAdapter):
            assert self._lora is not None
            self._lora.put(command.slot, self._lora.fit(command.adapter))
        elif isinstance(command, wire.ForgetChunks):
            rank.forget_chunks()
        elif isinstance(command, wire.FreeMemory):
            rank.runner.free_memory()


def _with_store(work: Work, store: KVStore | None) -> Work:
    """The work over this rank's own keys, which lie in the same blocks as everywhere."""
    prefix = work.batch.attn.prefix
    if prefix is None:
        return work
    assert store is not None
    attn = replace(work.batch.attn, prefix=prefix.over(store))
    return replace(work, batch=replace(work.batch, attn=attn))


def main() -> None:
    """Serves the pipe whose file descriptor is the argument."""
    logging.getLogger("anypool").setLevel(logging.ERROR)  # rank 0 has said the rest
    set_up_threads()
    Worker(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # to take an interpreter with torch apart takes seconds


if __name__ == "__main__":
    main()

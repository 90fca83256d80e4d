"""Runs batches on ranks that hold a model together: rank 0 in this process, the others in processes of their own.

Every rank gets every command, in the same order, and reports how each forward pass went. Results come from the last
stage. A pass has ended when all have reported: then they agree on whether it was a success.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import ClassVar

import torch
import torch.distributed as dist

from anypool.adapters.load import LoadedModel
from anypool.adapters.placement import pick_device
from anypool.config import EngineConfig
from anypool.engine import wire
from anypool.engine.processes import Processes
from anypool.errors import ConfigError, EngineDeadError
from anypool.model_executor import distributed
from anypool.model_executor.faults import PeerFailedError, is_out_of_memory, is_peers_failure
from anypool.model_executor.pooling_model_runner import PoolingModelRunner, RunnerOutput
from anypool.model_executor.rank import Rank, Work
from anypool.model_executor.stages import StageLink
from anypool.model_executor.weights.lora import PeftAdapter

# Seconds after the first rank's error within which the others have to report theirs.
_AGREE_S = 30.0
# Seconds that a rank waits for another that is busy. One that has died is noticed at once, whatever this says.
_PATIENCE_S = 24 * 3600.0
# Passes in a row, beyond those in flight, that may be lost without an error of the model.
_MOST_LOST = 3


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """What a rank loads: on GPUs each has one of its own. Rank 0 speaks for all, with progress bars and the like.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    config = config if rank == 0 else config.replace(use_tqdm_on_load=False)
    device = pick_device(config.device)
    if device.type == "cpu":
        return config.replace(device="cpu")
    number, there_are = device.index + rank, torch.cuda.device_count()
    if number >= there_are:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} and pipeline_parallel_size="
            f"{config.pipeline_parallel_size} need a GPU for each of {config.num_ranks} ranks, and from {device} on "
            f"torch sees {there_are - device.index}"
        )
    return config.replace(device=f"cuda:{number}")


def join(rank: int, config: EngineConfig, address: str) -> None:
    """Connects this process with the other ranks, which do the same."""
    try:
        distributed.start(
            rank,
            tp_size=config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            address=address,
            backend="gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
            timeout_s=_PATIENCE_S,
        )
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def make_rank(loaded: LoadedModel) -> Rank:
    """This process's part of a model, and its connections to the stages beside it."""
    here = distributed.ranks()
    link = StageLink(here, loaded.device) if here.pp_size > 1 else None
    slots = None if loaded.lora is None else loaded.lora.slots
    return Rank(PoolingModelRunner(loaded.model, loaded.device, link=link, lora=slots), here)


class Votes:
    """What the ranks report of one forward pass.

    Args:
        ranks: How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self.failed_at: float | None = None
        self.is_done = False
        self._missing = ranks
        self._output: RunnerOutput | None = None
        self._errors: list[Exception] = []

    def add(self, output: RunnerOutput | None, error: Exception | None) -> None:
        """Takes the report of one rank."""
        if error is not None:
            self._errors.append(error)
            self.failed_at = self.failed_at or time.monotonic()
        self._output = output or self._output
        self._missing -= 1
        self.is_done = self.is_done or self._missing == 0

    def give_up(self, error: Exception) -> None:
        """Ends it without the reports that are missing."""
        self._errors = [error]
        self.is_done = True

    @property
    def has_failed(self) -> bool:
        return bool(self._errors)

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and on no rank by itself."""
        return self.has_failed and all(map(is_peers_failure, self._errors))

    def result(self) -> RunnerOutput:
        """The results, once all have reported.

        Raises:
            Exception: Of the ranks' own errors one, of memory if there is such a one. `PeerFailedError` where no rank
                has an error of its own.
        """
        if self._errors:
            own = [error for error in self._errors if not is_peers_failure(error)]
            raise next(filter(is_out_of_memory, own), None) or next(
                iter(own), PeerFailedError("the ranks lost each other over another batch")
            )
        assert self._output is not None, "the last stage gives results"
        return self._output


class RanksExecutor:
    """The ranks, seen from the thread that has rank 0.

    Args:
        config: Of the engine.
        rank: Rank 0.
        processes: The others, which have loaded.
        threads: Of torch in this process when there are no ranks.
    """

    calls_back = True
    open_ranks: ClassVar[int] = 0  # of the one that is open: torch.distributed has one set of connections per process

    def __init__(self, config: EngineConfig, rank: Rank, processes: Processes, *, threads: int) -> None:
        RanksExecutor.open_ranks = config.num_ranks
        self._threads = threads
        # One more than stages: while all of them are busy, the next batch is on its way.
        self.depth = config.pipeline_parallel_size + 1 if config.pipeline_parallel_size > 1 else 1
        self.runner = rank.runner
        self._config, self._rank, self._processes = config, rank, processes
        self._rejoins = config.tensor_parallel_size > 1 and rank.runner.device.type == "cpu"
        self._numbers = count()
        self._changing = threading.Lock()
        self._votes: dict[int, Votes] = {}
        self._are_apart = False
        self._lost = 0
        self._on_done: Callable[[], None] = lambda: None
        self._death: EngineDeadError | None = None

    def watch(self, on_done: Callable[[], None], on_death: Callable[[EngineDeadError], None]) -> None:
        self._on_done = on_done
        self._processes.on_report = lambda rank, report: self._count(report)
        self._processes.is_overdue = self._overdue
        self._processes.on_death = lambda error: self._die(error, on_death)
        if self._processes.death.done():
            self._processes.death.result()

    def launch(self, work: Work) -> Votes:
        """Launches a forward pass, and runs rank 0's part of it."""
        if self._are_apart:
            self._join_again()
        number, votes = next(self._numbers), Votes(self._config.num_ranks)
        with self._changing:
            if self._death is not None:
                raise self._death
            self._votes[number] = votes
        self._processes.send(wire.Launch(number, work))
        outcome = self._rank.attempt(work)
        if isinstance(outcome, Exception):
            self._count(wire.Ran(number, error=outcome))
        else:
            self._count(wire.Ran(number, output=outcome))
        return votes

    def _count(self, report: wire.Ran) -> None:
        with self._changing:
            votes = self._votes.get(report.number)
            if votes is None:
                return
            votes.add(report.output, report.error)
            if not votes.is_done:
                return
            del self._votes[report.number]
            self._lost = self._lost + 1 if votes.is_lost else 0
            if self._lost > self.depth + _MOST_LOST:
                votes.give_up(EngineDeadError("the ranks lose each other again and again"))
            self._are_apart |= votes.has_failed and self._rejoins
        self._on_done()

    def _join_again(self) -> None:
        """After an error that made the ranks leave each other. What was launched before has failed, or will."""
        address = self._processes.address()
        self._processes.send(wire.Join(address))
        self._rank.leave()
        try:
            join(0, self._config, address)
        except RuntimeError as error:
            raise EngineDeadError(f"the ranks could not join each other again: {error}") from error
        self._are_apart = False

    def _overdue(self) -> str | None:
        with self._changing:
            failed = [votes.failed_at for votes in self._votes.values() if votes.failed_at is not None]
        if failed and time.monotonic() - min(failed) > _AGREE_S:
            return f"a rank failed, and others have not answered within {_AGREE_S:.0f} s"
        return None

    def _die(self, error: EngineDeadError, on_death: Callable[[EngineDeadError], None]) -> None:
        with self._changing:
            self._death = error
            for votes in self._votes.values():
                votes.give_up(error)
            self._votes.clear()
        on_death(error)

    def put_adapter(self, slot: int, adapter: PeftAdapter) -> None:
        self._processes.send(wire.PutAdapter(slot, adapter))

    def forget_chunks(self) -> None:
        self._processes.send(wire.ForgetChunks())
        self._rank.forget_chunks()

    def free_memory(self) -> None:
        self._processes.send(wire.FreeMemory())
        self.runner.free_memory()

    def close(self) -> None:
        self._processes.end()
        self._rank.forget_chunks()
        self._rank.leave()
        self._processes.clean_up()
        torch.set_num_threads(self._threads)  # of threads that come
        RanksExecutor.open_ranks = 0

    def kill(self) -> None:
        self._processes.end(at_once=True)

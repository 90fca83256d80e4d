"""What one process does of each forward pass: all of it, or the part of its stage and share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from anypool.model_executor import distributed
from anypool.model_executor.distributed import Ranks
from anypool.model_executor.faults import PeerFailedError, forget_tensors
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import Launched, PoolingModelRunner, RunnerOutput
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import ChunkedPooling


class Chunk(NamedTuple):
    """A place among the chunks of a long prompt."""

    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Work:
    """One forward pass.

    Attributes:
        batch: The packed sequences, on the host.
        plans: One per sequence; of a chunk, all that its prompt gets.
        further: Other plans of each sequence, for which it is not run again.
        chunk: Which part of a long prompt the only sequence is; None for whole prompts.
    """

    batch: PackedBatch
    plans: Sequence[PoolingPlan]
    further: Sequence[Sequence[PoolingPlan]] = field(default=())
    chunk: Chunk | None = None


class Rank:
    """A runner, and what the chunks of a long prompt have been folded into so far: one such prompt at a time.

    Args:
        runner: Of this process's part of the model.
        ranks: Where this process stands.
    """

    def __init__(self, runner: PoolingModelRunner, ranks: Ranks | None = None) -> None:
        self.runner = runner
        self._is_split = ranks is not None and ranks.tp_size > 1
        self._pools = ranks is None or (ranks.is_last_stage and ranks.tp_rank == 0)
        self._pooling: list[ChunkedPooling] = []

    def launch(self, work: Work) -> Launched | None:
        """Launches this process's part of a forward pass; None where the results come from another rank."""
        if not self._pools:
            self.runner.forward(work.batch.to(self.runner.device))
            return None
        if work.chunk is None:
            return self.runner.launch(work.batch, work.plans, work.further)
        if work.chunk.is_first:
            self._pooling = self.runner.begin_chunks(work.batch, work.plans)
        launched = self.runner.launch_chunk(work.batch, self._pooling, is_last=work.chunk.is_last)
        if work.chunk.is_last:
            self.forget_chunks()
        return launched

    def forget_chunks(self) -> None:
        """Frees what a long prompt left that will not be run to its end."""
        self._pooling = []

    def attempt(self, work: Work) -> RunnerOutput | Exception | None:
        """What this process's part of a forward pass gives or raises. After an error nobody waits for this process.

        Processes that hold layers together cannot tell how far the others have come, so one that fails leaves them.
        That ends their waiting. They fail, too, and all have to join each other again.
        """
        link = self.runner.link
        if self._is_split and distributed.ranks().size == 1:
            return PeerFailedError("this rank has left the others")
        try:
            if link is not None:
                link.begin()
            launched = self.launch(work)
            return None if launched is None else launched.result()
        except Exception as error:  # anything a model may raise; it goes to the request that caused it
            failure = error
        forget_tensors(failure)  # they hold the connections, too
        if self._is_split and self.runner.device.type == "cpu":
            self.leave()
        elif link is not None:
            with suppress(RuntimeError):  # a connection that is gone needs no news
                link.give_up()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()  # does not end where a sum waits for others: who is not heard of then is given up
        return failure

    def leave(self) -> None:
        """Closes the connections to the other processes."""
        if self.runner.link is not None:
            self.runner.link.forget()
        distributed.stop()

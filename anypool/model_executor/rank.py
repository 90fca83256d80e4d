"""What one process does of each forward pass: all of it, or the part of its stage and share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import Launched, PoolingModelRunner
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
        pools: Whether results are made here, rather than on another rank.
    """

    def __init__(self, runner: PoolingModelRunner, *, pools: bool = True) -> None:
        self.runner = runner
        self.pools = pools
        self._pooling: list[ChunkedPooling] = []

    def launch(self, work: Work) -> Launched | None:
        """Launches this process's part of a forward pass; None where the results come from another rank."""
        if not self.pools:
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

"""What the engine counts: plain counters and histograms, for whoever reports them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from anypool.engine.pieces import Piece
from anypool.engine.request import Request
from anypool.model_executor.pooling_model_runner import RunnerOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Histogram:
    """Counts of values up to each bound, as Prometheus has them, with sum and count.

    Args:
        bounds: Upper bounds, rising; values above the last are counted without a bucket of their own.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.count = 0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self.buckets[bisect_left(self.bounds, value)] += 1
            self.sum += value
            self.count += 1

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


def _seconds() -> Histogram:
    return Histogram(_SECONDS)


# Counted where requests are queued; all else where they are run.
_OF_THE_QUEUE = ("requests", "tasks", "rejected", "truncated", "prompt_tokens", "queue_s", "prepare_s")

# Values of some counters and histograms by name: a number, or a histogram's buckets, sum and count.
Counts = dict[str, list[float]]


@dataclass
class EngineMetrics:
    """Counted since the engine started. Histograms may be observed from any thread.

    Attributes:
        requests: Finished requests by outcome: ok, error, nan, cancelled, expired.
        tasks: Requests submitted, by task.
        rejected: Requests refused because the queue was full.
        truncated: Requests whose prompt was cut.
        prompt_tokens: Tokens of submitted prompts.
        computed_tokens: Tokens that went through the model.
        cached_tokens: Tokens whose keys were read from the prefix cache.
        looked_up_tokens: Tokens that were looked for in the prefix cache.
        batches: Forward passes.
        chunks: Those that ran a part of a long prompt.
        padding_tokens: Tokens that filled forward passes up to a common number of rows.
        failed_batches: Forward passes that raised.
        out_of_memory: Those of them that ran out of memory.
        adapter_loads: LoRA adapters that were put into a slot.
        batch_tokens, batch_sequences: Sizes of forward passes.
        batch_fill: Tokens of a forward pass as a share of the budget.
        queue_s: Seconds between submission and the first forward pass.
        prepare_s: Seconds of checking and tokenising, per call.
        forward_s, pool_s: Seconds in the backbone and in the poolers, per forward pass.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    rejected: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    batches: int = 0
    chunks: int = 0
    padding_tokens: int = 0
    failed_batches: int = 0
    out_of_memory: int = 0
    adapter_loads: int = 0
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(_SEQUENCES))
    batch_fill: Histogram = field(default_factory=lambda: Histogram(_SHARES))
    queue_s: Histogram = field(default_factory=_seconds)
    prepare_s: Histogram = field(default_factory=_seconds)
    forward_s: Histogram = field(default_factory=_seconds)
    pool_s: Histogram = field(default_factory=_seconds)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def submitted(self, requests: Sequence[Request]) -> None:
        """Counts requests that were queued."""
        for request in requests:
            self.tasks[request.plan.task.value] += 1
            self.prompt_tokens += len(request)
            self.truncated += request.num_truncated_tokens > 0

    def started(self, requests: Sequence[Request], now: float) -> None:
        """Notes when requests' first forward pass begins, and counts how long they waited for it."""
        for request in requests:
            request.started = now
            self.queue_s.observe(now - request.submitted)

    def ran(self, pieces: Sequence[Piece], output: RunnerOutput, *, budget: int) -> None:
        """Counts a forward pass."""
        tokens = sum(map(len, pieces))
        self.batches += 1
        self.chunks += not pieces[0].is_last
        self.computed_tokens += tokens
        self.padding_tokens += output.padding_tokens
        self.batch_tokens.observe(tokens)
        self.batch_sequences.observe(len(pieces))
        self.batch_fill.observe(tokens / budget)
        self.forward_s.observe(output.forward_s)
        self.pool_s.observe(output.pool_s)

    def refused(self) -> None:
        """Counts a request that was refused because too much was waiting."""
        with self._lock:
            self.rejected += 1

    def ended(self, request: Request, outcome: str) -> None:
        """Counts a request that has its answer."""
        with self._lock:  # callers drop what is cancelled or expired
            self.requests[outcome] += 1

    def run_counts(self) -> Counts:
        """What was counted about forward passes."""
        found: Counts = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _OF_THE_QUEUE:
                continue
            if isinstance(value, Histogram):
                found[one.name] = [*value.buckets, value.sum, value.count]
            elif isinstance(value, int):
                found[one.name] = [value]
        return found

    def add_run_counts(self, counts: Counts) -> None:
        """Adds what another process counted about its forward passes. One thread at a time."""
        for name, values in counts.items():
            own = getattr(self, name)
            if isinstance(own, Histogram):
                *buckets, total, count = values
                own.buckets = [int(a + b) for a, b in zip(own.buckets, buckets, strict=True)]
                own.sum += total
                own.count += int(count)
            else:
                setattr(self, name, own + int(values[0]))

    @property
    def cache_hit_rate(self) -> float:
        """Share of the tokens looked for in the prefix cache that were found."""
        return self.cached_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0

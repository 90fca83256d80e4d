"""Runs a pooling model on packed batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from anypool.kernels.dispatch import has_triton
from anypool.kernels.segmented_lora import BASE
from anypool.kernels.varlen_attention import LARGEST_HEAD
from anypool.model_executor.cuda_graphs import CudaGraphs
from anypool.model_executor.layers.lora import LoRASlots
from anypool.model_executor.packed_batch import PackedBatch, common_rows
from anypool.model_executor.transfers import to_host
from anypool.pooling.methods import Segments
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import ChunkedPooling, DispatchPooler, PooledGroup, SequencePooler, rows_of


@dataclass(frozen=True)
class RunnerOutput:
    """What a forward pass gave, and what it took.

    Attributes:
        results: Per sequence `[E]`, or `[tokens, E]` for token-level tasks: float32 on the CPU, each in memory of its
            own, so that who keeps or pickles one has no other's. Empty where a chunk ended before its prompt did.
        others: Results of the same sequences for further plans.
        are_finite: Whether all results of each sequence are.
        padding_tokens: Tokens that filled the batch up to a common number of rows.
        forward_s, pool_s: Seconds in the backbone and in the poolers. On a GPU the first is the time to launch it.
    """

    results: list[torch.Tensor]
    others: list[list[torch.Tensor]]
    are_finite: list[bool]
    padding_tokens: int
    forward_s: float
    pool_s: float


class PoolingModelRunner:
    """Forward, pool, one copy to the host.

    Args:
        model: A pooling model: a backbone with a `pooler`.
        device: Where it runs.
        enforce_eager: Whether CUDA graphs are never captured.
        graphs: Captured forward passes, in place of those that are made where the model and the device allow it.
        lora: The adapters of the model, where it takes some.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        enforce_eager: bool = False,
        graphs: CudaGraphs | None = None,
        lora: LoRASlots | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.lora = lora
        self.graphs = graphs
        if graphs is None and not enforce_eager and can_capture(model, device):
            self.graphs = CudaGraphs(self.compute, device)

    @torch.inference_mode()
    def run(
        self, batch: PackedBatch, plans: Sequence[PoolingPlan], further: Sequence[Sequence[PoolingPlan]] = ()
    ) -> RunnerOutput:
        """Runs whole prompts, or what is left of them after their cached prefixes.

        Args:
            batch: The packed sequences, on the host or the model's device.
            plans: One per sequence.
            further: Other plans of each sequence, for which it is not run again.
        """
        began = time.perf_counter()
        further = further or [()] * len(plans)
        others: list[list[torch.Tensor]] = [[] for _ in plans]
        plan = None if any(further) else self._shared_plan(plans)
        captured = self.graphs.run(batch, plan) if self.graphs is not None and not batch.adapters else None
        forwarded = time.perf_counter()
        if captured is not None and plan is not None:
            groups = [PooledGroup(tuple(range(len(plans))), captured.values)]
        else:
            batch = batch.to(self.device)
            hidden_TD = self._forward(batch) if captured is None else captured.values
            forwarded = time.perf_counter()
            hidden_TD = _with_cached_rows(hidden_TD, batch)
            groups = self._pool(hidden_TD, batch.segments, plans, batch.adapters)
            others = self._pool_again(hidden_TD, batch.segments, further, batch.adapters)
        results = _to_host(groups, len(plans))
        padding = self._padding(batch) if captured is None else captured.padding_tokens
        return _output(results, others, padding, began, forwarded)

    def _pool(
        self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan], adapters: Sequence[int]
    ) -> list[PooledGroup]:
        """Results by the model's pooler, or by that of the sequence's adapter where it has its own."""
        own = {} if self.lora is None else self.lora.poolers
        by_slot: dict[int, list[int]] = {}
        for index, slot in enumerate(adapters or (BASE,) * len(plans)):
            by_slot.setdefault(slot if slot in own else BASE, []).append(index)
        if list(by_slot) == [BASE]:
            groups: list[PooledGroup] = self.model.pooler(hidden_TD, segments, plans)
            return groups
        found = []
        for slot, indices in by_slot.items():
            pooler = own.get(slot, self.model.pooler)
            rows_TD = rows_of(hidden_TD, segments, indices)
            for group in pooler(rows_TD, segments.subset(indices), [plans[i] for i in indices]):
                found.append(PooledGroup(tuple(indices[i] for i in group.requests), group.values, group.rows))
        return found

    def _pool_again(
        self,
        hidden_TD: torch.Tensor,
        segments: Segments,
        further: Sequence[Sequence[PoolingPlan]],
        adapters: Sequence[int],
    ) -> list[list[torch.Tensor]]:
        """The results of further plans, of which sequences may have any number."""
        results: list[list[torch.Tensor]] = [[] for _ in further]
        for place in range(max(map(len, further), default=0)):
            indices = [index for index, plans in enumerate(further) if len(plans) > place]
            some = segments.subset(indices)
            rows_TD = hidden_TD
            if len(indices) < len(further):
                sequences = hidden_TD.split(segments.lengths)
                rows_TD = torch.cat([sequences[index] for index in indices])
            own = [adapters[index] for index in indices] if adapters else ()
            groups = self._pool(rows_TD, some, [further[index][place] for index in indices], own)
            for index, result in zip(indices, _to_host(groups, len(indices)), strict=True):
                results[index].append(result)
        return results

    def compute(self, batch: PackedBatch, plan: PoolingPlan | None) -> torch.Tensor:
        """What a graph holds: `[T, D]` hidden states, or the `[N, E]` results that a shared plan makes of them."""
        hidden_TD: torch.Tensor = self.model(
            batch.input_ids_T, batch.positions_T, batch.attn, token_type_ids_T=batch.token_type_ids_T
        )
        if plan is None:
            return hidden_TD
        pooler: SequencePooler = self.model.pooler.graphable(plan)
        return pooler.results(hidden_TD, batch.segments, plan)

    def free_graphs(self) -> None:
        """Gives the memory of captured graphs back; they are captured again when they are needed."""
        if self.graphs is not None:
            self.graphs.clear()

    def _shared_plan(self, plans: Sequence[PoolingPlan]) -> PoolingPlan | None:
        """The plan of all requests, where its pooler can be in a graph."""
        pooler = self.model.pooler
        if self.graphs is None or not isinstance(pooler, DispatchPooler) or len(set(plans)) > 1:
            return None
        return None if pooler.graphable(plans[0]) is None else plans[0]

    @torch.inference_mode()
    def begin_chunks(self, batch: PackedBatch, plans: Sequence[PoolingPlan]) -> list[ChunkedPooling]:
        """Starts pooling a prompt that runs in chunks. A prefix that is cached counts at once.

        Args:
            batch: The first chunk, the only sequence of its batch.
            plans: What the prompt gets.
        """
        batch = batch.to(self.device)
        segments, cached = batch.segments, cached_rows(batch, 0)
        own = {} if self.lora is None or not batch.adapters else self.lora.poolers
        pooler = own.get(batch.adapters[0], self.model.pooler) if own else self.model.pooler
        found = []
        for plan in plans:
            pooling = pooler.begin(plan, skip=segments.skips[0], pad_token_id=segments.pad_token_id)
            if cached is not None:
                assert segments.input_ids_T is not None
                pooling.update(cached, segments.input_ids_T[: len(cached)])
            found.append(pooling)
        return found

    @torch.inference_mode()
    def run_chunk(self, batch: PackedBatch, pooling: Sequence[ChunkedPooling], *, is_last: bool) -> RunnerOutput:
        """Runs the next chunk of a prompt.

        Args:
            batch: The chunk, the only sequence of its batch.
            pooling: What the chunks before it were folded into, for each plan.
            is_last: Whether the prompt ends with it.
        """
        began = time.perf_counter()
        batch = batch.to(self.device)
        hidden_TD = self._forward(batch)
        forwarded = time.perf_counter()
        for one in pooling:
            one.update(hidden_TD, batch.input_ids_T)
        results = [_to_host([one.result()], 1)[0] for one in pooling] if is_last else []
        return _output(results[:1], [results[1:]] if is_last else [], self._padding(batch), began, forwarded)

    @property
    def _fills(self) -> bool:
        return self.device.type == "cpu" and bool(getattr(self.model, "fills_batches", True))

    def _padding(self, batch: PackedBatch) -> int:
        tokens = batch.input_ids_T.shape[0]
        return common_rows(tokens) - tokens if self._fills else 0

    def _adapters(self, batch: PackedBatch, tokens: int) -> AbstractContextManager[None]:
        """Each of the batch's first tokens runs with the adapter of its sequence inside."""
        if self.lora is None or not batch.adapters:
            return nullcontext()
        lengths = batch.attn.lengths[: len(batch.adapters)]
        assert sum(lengths) == tokens
        return self.lora.running(batch.adapters, lengths, len(batch.input_ids_T))

    def _forward(self, batch: PackedBatch) -> torch.Tensor:
        tokens = batch.input_ids_T.shape[0]
        if self._fills:
            batch = batch.filled()
        prefix = batch.attn.prefix
        if prefix is not None:
            prefix.begin()
        images = {"images": batch.images} if batch.images else {}  # only classes that read images know the argument
        with self._adapters(batch, tokens):
            hidden_TD: torch.Tensor = self.model(
                batch.input_ids_T, batch.positions_T, batch.attn, token_type_ids_T=batch.token_type_ids_T, **images
            )
        if prefix is not None:
            prefix.end()
            if batch.keeps_hidden:
                prefix.store.write_hidden(prefix.slots_S, hidden_TD.index_select(0, prefix.rows_S))
        return hidden_TD[:tokens]


def can_capture(model: Any, device: torch.device) -> bool:
    """Whether a model's forward pass fits into a CUDA graph: it asks nothing of the host, and its attention neither."""
    return device.type == "cuda" and bool(getattr(model, "can_capture", False)) and _has_packed_attention(model)


def _has_packed_attention(model: Any) -> bool:
    return has_triton() and model.config.head_size <= LARGEST_HEAD


def _output(
    results: list[torch.Tensor], others: list[list[torch.Tensor]], padding: int, began: float, forwarded: float
) -> RunnerOutput:
    ended = time.perf_counter()
    are_finite = [
        all(bool(one.isfinite().all()) for one in (result, *more)) for result, more in zip(results, others, strict=True)
    ]
    return RunnerOutput(results, others, are_finite, padding, forwarded - began, ended - forwarded)


def cached_rows(batch: PackedBatch, sequence: int) -> torch.Tensor | None:
    """`[start, D]` hidden states of the tokens before a sequence, or None where there are none or they are not kept."""
    prefix = batch.attn.prefix
    if prefix is None or not batch.keeps_hidden or prefix.lengths[sequence] == 0:
        return None
    store, start = prefix.store, prefix.lengths[sequence]
    blocks_B1 = prefix.block_tables[sequence][: -(-start // store.block_size), None]
    slots_S = (blocks_B1 * store.block_size + torch.arange(store.block_size, device=blocks_B1.device)).flatten()
    return store.read_hidden(slots_S[:start])


def _with_cached_rows(hidden_TD: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The hidden states of the whole prompts of a batch, those of cached prefixes read from the store."""
    cached = [cached_rows(batch, sequence) for sequence in range(len(batch.attn.lengths))]
    if all(rows is None for rows in cached):
        return hidden_TD
    own = hidden_TD.split(batch.attn.lengths)
    return torch.cat([rows for pair in zip(cached, own, strict=True) for rows in pair if rows is not None])


def _to_host(groups: Sequence[PooledGroup], count: int) -> list[torch.Tensor]:
    """Results in the order of the batch's sequences."""
    results: list[torch.Tensor | None] = [None] * count
    for group, values in zip(groups, to_host([group.values for group in groups]), strict=True):
        parts = values.unbind(0) if group.rows is None else values.split(group.rows)
        with torch.inference_mode(False):  # so that results can be used where gradients are recorded
            for request, part in zip(group.requests, parts, strict=True):
                results[request] = part.clone()
    assert all(result is not None for result in results), "a pooler left a request without a result"
    return results  # type: ignore[return-value]

"""Forward passes captured as CUDA graphs, so that a small batch costs one launch instead of hundreds.

A graph has fixed shapes, so there is one per bucket: a number of tokens and of sequences. What a batch has less of them
is filled with dummy sequences, which stand last and never reach a result. Batches so large that launches do not matter
run eagerly. Where all requests of a batch get the same, the pooler is inside the graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.faults import is_out_of_memory, is_sticky
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.transfers import staged, views_of
from anypool.pooling.methods import Segments
from anypool.pooling.plan import PoolingPlan

logger = logging.getLogger(__name__)

# Above so many tokens a forward pass takes longer than its launches, on any model worth a GPU.
MAX_TOKENS = 2048
MAX_GRAPHS = 64
_LEAST_TOKENS = 16


class Bucket(NamedTuple):
    """The shape of a graph; at least one of its sequences is a dummy."""

    tokens: int
    sequences: int


def choose_bucket(tokens: int, sequences: int, *, max_tokens: int = MAX_TOKENS) -> Bucket | None:
    """The smallest bucket for a batch; None where it is to run eagerly.

    Sequences are a power of two and one dummy more. Each dummy has at least one token, so no sequence is empty. Tokens
    grow by half or a third, so that on average a sixth of them are dummies'.
    """
    room = 1 + (1 << (sequences - 1).bit_length())
    least = tokens + room - sequences
    size = _LEAST_TOKENS
    while size < least:  # 16, 24, 32, 48, 64, ...
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return Bucket(size, room) if size <= max_tokens else None


def dummy_lengths(bucket: Bucket, tokens: int, sequences: int) -> list[int]:
    """Tokens of each dummy sequence, as even as they can be: attention's work grows with the square."""
    count, left = bucket.sequences - sequences, bucket.tokens - tokens
    assert count > 0 and left >= count, "a bucket has room for a token of each dummy"
    return [left // count + (i < left % count) for i in range(count)]


class Graph(Protocol):
    """A captured function: `replay` computes `output` anew from what the static inputs hold."""

    output: torch.Tensor

    def replay(self) -> None: ...


class CapturedGraph:
    """A `torch.cuda.CUDAGraph`.

    Args:
        function: What is captured: it reads static memory and does not wait for the device.
        pool: The memory that graphs share, since they run one at a time and results are copied before the next.
    """

    def __init__(self, function: Callable[[], torch.Tensor], pool: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces allocated before the capture
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        cause: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    self.output = function()
                except Exception as error:
                    cause = error
                    raise
        except Exception:
            # To end a capture that went wrong raises as well, which hides why, and leaves its stream current.
            torch.cuda.set_stream(current)
            if cause is None:
                raise
            raise cause from None
        finally:
            del cause  # it has a traceback, and that this frame

    def replay(self) -> None:
        self._graph.replay()


class StaticInputs:
    """The memory that a graph reads its batch from, filled by one copy.

    Args:
        bucket: Its shape.
        device: Where it is.
        like: A batch of the kind that will be run.
    """

    def __init__(self, bucket: Bucket, device: torch.device, like: PackedBatch) -> None:
        self.bucket = bucket
        self.has_types = like.token_type_ids_T is not None
        parts = self._padded(like)
        self._pin = device.type == "cuda"
        self._bytes = staged(parts, pin=False).to(device)
        ids_T, positions_T, cu_seqlens, skips_N, *types = views_of(self._bytes, parts)
        self.batch = PackedBatch(
            input_ids_T=ids_T,
            positions_T=positions_T,
            attn=AttentionMetadata((), cu_seqlens, (bucket.tokens,), is_static=True),
            segments=Segments((), (), device, ids_T, like.segments.pad_token_id, cu_seqlens, skips_N),
            token_type_ids_T=types[0] if types else None,
        )

    def load(self, batch: PackedBatch) -> None:
        """Copies a batch in, dummies behind it."""
        self._bytes.copy_(staged(self._padded(batch), pin=self._pin), non_blocking=True)

    def _padded(self, batch: PackedBatch) -> list[torch.Tensor]:
        tokens, sequences = len(batch.input_ids_T), len(batch.attn.lengths)
        fill = self.bucket.tokens - tokens
        dummies = torch.tensor(dummy_lengths(self.bucket, tokens, sequences), dtype=torch.int32)
        skips = F.pad(torch.tensor(batch.segments.skips, dtype=torch.int32), (0, len(dummies)))
        parts = [
            F.pad(batch.input_ids_T, (0, fill)),
            F.pad(batch.positions_T, (0, fill)),
            torch.cat([batch.attn.cu_seqlens, tokens + dummies.cumsum(0, dtype=torch.int32)]),
            skips,
        ]
        if self.has_types:
            types_T = batch.token_type_ids_T
            parts.append(torch.zeros_like(parts[0]) if types_T is None else F.pad(types_T, (0, fill)))
        return parts


@dataclass(frozen=True)
class GraphOutput:
    """What a graph gave.

    Attributes:
        values: `[N, E]` results where the pooler is in the graph, else `[T, D]` hidden states. The next batch
            overwrites them.
        padding_tokens: Those of the dummies.
    """

    values: torch.Tensor
    padding_tokens: int


class CudaGraphs:
    """Graphs of one model, captured when a batch of their kind first comes.

    Args:
        compute: A batch, and the plan that all its requests share or None -> results or hidden states.
        device: Where the model runs.
        capture: Makes a graph of a function.
        max_tokens: Batches that need a larger bucket run eagerly.
        max_graphs: How many are kept; the one not used for longest goes.
    """

    def __init__(
        self,
        compute: Callable[[PackedBatch, PoolingPlan | None], torch.Tensor],
        device: torch.device,
        *,
        capture: Callable[[Callable[[], torch.Tensor], Any], Graph] = CapturedGraph,
        max_tokens: int = MAX_TOKENS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._compute, self._device, self._capture = compute, device, capture
        self._max_tokens, self._max_graphs = max_tokens, max_graphs
        self._pool: Any = None
        self._graphs: OrderedDict[object, tuple[StaticInputs, Graph]] = OrderedDict()
        self._refused = False

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, batch: PackedBatch, plan: PoolingPlan | None) -> GraphOutput | None:
        """Runs a batch; None where it is to run eagerly.

        Args:
            batch: Whole prompts, on the host.
            plan: What all its requests get, for a pooler in the graph; None for hidden states.
        """
        tokens, sequences = len(batch.input_ids_T), len(batch.attn.lengths)
        bucket = choose_bucket(tokens, sequences, max_tokens=self._max_tokens)
        if self._refused or bucket is None or batch.attn.prefix is not None or batch.attn.key_lengths is not None:
            return None
        key = bucket, plan, batch.token_type_ids_T is not None, batch.segments.pad_token_id
        if key not in self._graphs and not self._add(key, bucket, batch, plan):
            return None
        self._graphs.move_to_end(key)
        inputs, graph = self._graphs[key]
        inputs.load(batch)
        graph.replay()
        return GraphOutput(graph.output[: tokens if plan is None else sequences], bucket.tokens - tokens)

    def clear(self) -> None:
        """Gives up all graphs and their memory."""
        self._graphs.clear()

    def _add(self, key: object, bucket: Bucket, batch: PackedBatch, plan: PoolingPlan | None) -> bool:
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        if not self._graphs and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()  # torch takes none again whose graphs are all gone
        inputs = StaticInputs(bucket, self._device, batch)
        try:
            graph = self._capture(lambda: self._compute(inputs.batch, plan), self._pool)
        except Exception as error:  # whatever it is, if it has nothing to do with graphs an eager run raises it again
            if is_out_of_memory(error) or is_sticky(error):
                raise
            # A class of a user's own may do what a graph cannot hold, such as to wait for the device.
            logger.warning("CUDA graphs are off, since capturing one raised: %s", error)
            self._refused = True
            self.clear()
            return False
        self._graphs[key] = inputs, graph
        return True

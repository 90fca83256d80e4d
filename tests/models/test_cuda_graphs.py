"""The logic of CUDA graphs, with a graph that runs the function again on the static inputs in place of replaying it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.model_executor.cuda_graphs import (
    Bucket,
    CapturedGraph,
    CudaGraphs,
    StaticInputs,
    choose_bucket,
    dummy_lengths,
)
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import PoolingModelRunner, can_capture
from anypool.pooling.methods import PoolingType, pool, row_of
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import EmbedPooler
from anypool.pooling.tasks import PoolingTask
from tests.helpers import assert_close, tiny_bert, tiny_llama

CPU = torch.device("cpu")
EMBED = PoolingPlan(task=PoolingTask.EMBED, normalize=True)
CUT = PoolingPlan(task=PoolingTask.EMBED, normalize=True, dimensions=8)
TOKENS = PoolingPlan(task=PoolingTask.TOKEN_EMBED, normalize=True)


class FakeGraph:
    """Counts captures and replays, and gives its output in the same memory every time, as a graph does."""

    made: list[FakeGraph] = []  # noqa: RUF012  # emptied for every test

    def __init__(self, function: Callable[[], torch.Tensor], pool: Any) -> None:
        self.function, self.output, self.replays = function, function(), 0
        self.output.fill_(float("nan"))
        FakeGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.function())


@pytest.fixture(autouse=True)
def _no_graphs_yet() -> None:
    FakeGraph.made.clear()


def ids(*lengths: int, first: int = 3) -> list[list[int]]:
    return [[first + (7 * i + 3 * n) % 40 for i in range(n)] for n in lengths]


def pack(sequences: list[list[int]], **options: Any) -> PackedBatch:
    return PackedBatch.pack(sequences, device=CPU, **options)


def sums(batch: PackedBatch, plan: PoolingPlan | None) -> torch.Tensor:
    """A model that gives each token its id and position, and each sequence the sum of its tokens' ids and its skip."""
    rows_T2 = torch.stack([batch.input_ids_T, batch.positions_T], dim=1).float()
    if plan is None:
        return rows_T2
    bounds, skips_N = batch.segments.cu_seqlens.tolist(), batch.segments.skips_N
    assert skips_N is not None
    rows = [rows_T2[a:b, 0].sum() for a, b in zip(bounds, bounds[1:], strict=False)]  # noqa: RUF007  # as pairs
    return torch.stack([torch.stack(rows), skips_N.float()], dim=1)


def graphs(**options: Any) -> CudaGraphs:
    return CudaGraphs(sums, CPU, capture=FakeGraph, **options)


@pytest.mark.parametrize(
    ("tokens", "sequences", "bucket"),
    [
        (1, 1, Bucket(16, 2)),
        (15, 1, Bucket(16, 2)),
        (16, 1, Bucket(24, 2)),  # the dummy has a token, too
        (12, 3, Bucket(16, 5)),
        (15, 3, Bucket(24, 5)),
        (32, 4, Bucket(48, 5)),
        (500, 100, Bucket(768, 129)),
        (1500, 9, Bucket(1536, 17)),
        (2047, 1, Bucket(2048, 2)),
        (2048, 1, None),
        (1800, 256, Bucket(2048, 257)),
        (1900, 129, Bucket(2048, 257)),
        (1950, 129, None),
    ],
)
def test_the_bucket_of_a_batch(tokens: int, sequences: int, bucket: Bucket | None) -> None:
    assert choose_bucket(tokens, sequences) == bucket


def test_every_bucket_has_room_for_a_token_of_each_dummy() -> None:
    for sequences in (1, 2, 3, 5, 31, 64):
        for tokens in range(sequences, 700, 7):
            bucket = choose_bucket(tokens, sequences)
            assert bucket is not None
            dummies = dummy_lengths(bucket, tokens, sequences)
            assert min(dummies) >= 1
            assert (len(dummies) + sequences, sum(dummies) + tokens) == (bucket.sequences, bucket.tokens)
            assert max(dummies) - min(dummies) <= 1


def test_results_are_those_of_the_batch_and_no_dummys() -> None:
    some = graphs()
    large, small = ids(9, 5, 7), ids(4, 10, 6, first=11)
    for sequences in (large, small, large):  # one bucket: what a batch leaves behind must not be seen by the next
        output = some.run(pack(sequences, skips=[1, 0, 2]), EMBED)
        assert output is not None
        assert output.values.tolist() == [[sum(own), skip] for own, skip in zip(sequences, (1, 0, 2), strict=True)]
        assert output.padding_tokens == 24 - sum(map(len, sequences))
    assert [graph.replays for graph in FakeGraph.made] == [3]


def test_hidden_states_are_those_of_the_batchs_tokens() -> None:
    some = graphs()
    for sequences in (ids(9, 5), ids(2, 3)):
        output = some.run(pack(sequences), None)
        assert output is not None
        flat = [[token, place] for own in sequences for place, token in enumerate(own)]
        assert output.values.tolist() == flat


def test_segment_ids_are_copied_and_those_of_dummies_are_zero() -> None:
    seen = []

    def remember(batch: PackedBatch, plan: PoolingPlan | None) -> torch.Tensor:
        seen.append(None if batch.token_type_ids_T is None else batch.token_type_ids_T.tolist())
        return sums(batch, plan)

    some = CudaGraphs(remember, CPU, capture=FakeGraph)
    some.run(pack(ids(9, 5), token_types=[[1] * 9, [1] * 5]), EMBED)
    some.run(pack(ids(3, 3), token_types=[[0, 1, 1], None]), EMBED)
    some.run(pack(ids(9, 5)), EMBED)
    assert seen[1] == [1] * 14 + [0] * 2
    assert seen[2] == [0, 1, 1] + [0] * 13
    assert seen[4] is None


def test_there_is_a_graph_per_bucket_and_plan_and_the_one_not_used_for_longest_goes() -> None:
    some = graphs(max_graphs=2)
    short, long = pack(ids(4)), pack(ids(40))
    some.run(short, EMBED)
    some.run(long, EMBED)
    some.run(short, EMBED)
    some.run(short, CUT)  # takes the place of the long one's
    assert (len(some), len(FakeGraph.made)) == (2, 3)
    some.run(short, EMBED)
    assert len(FakeGraph.made) == 3
    some.run(long, EMBED)
    assert (len(some), len(FakeGraph.made)) == (2, 4)
    some.clear()
    assert len(some) == 0


def test_a_batch_outside_all_buckets_runs_eagerly() -> None:
    some = graphs(max_tokens=64)
    assert some.run(pack(ids(64)), EMBED) is None
    assert some.run(pack(ids(63)), EMBED) is not None


def test_what_cannot_be_captured_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    tries = []

    def fails(function: Any, pool: Any) -> Any:
        tries.append(function)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    some = CudaGraphs(sums, CPU, capture=fails)
    assert some.run(pack(ids(4)), EMBED) is None
    assert some.run(pack(ids(40)), EMBED) is None
    assert len(tries) == 1
    assert "CUDA graphs are off, since capturing one raised: CUDA error: operation not permitted" in caplog.text


def test_a_class_of_a_users_own_that_reads_lengths_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """In a graph there are none, so that its error has nothing to do with CUDA."""

    def longest(batch: PackedBatch, plan: PoolingPlan | None) -> torch.Tensor:
        return torch.zeros(max(batch.attn.lengths))

    assert CudaGraphs(longest, CPU, capture=FakeGraph).run(pack(ids(4)), EMBED) is None
    assert "CUDA graphs are off" in caplog.text


def test_when_all_graphs_are_gone_the_next_one_has_a_new_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses the handle of a pool that had graphs and has none."""
    handles, pools = iter(range(9)), []

    class Pooled(FakeGraph):
        def __init__(self, function: Callable[[], torch.Tensor], pool: Any) -> None:
            super().__init__(function, pool)
            pools.append(pool)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    some = CudaGraphs(sums, CPU, capture=Pooled)
    some._device = torch.device("cuda")
    monkeypatch.setattr(StaticInputs, "__init__", partialmethod(_on_cpu, StaticInputs.__init__))
    for lengths in ((4,), (40,)):
        some.run(pack(ids(*lengths)), EMBED)
    some.clear()
    some.run(pack(ids(4)), EMBED)
    assert pools == [0, 0, 1]


def _on_cpu(self: StaticInputs, make: Any, bucket: Bucket, device: torch.device, like: PackedBatch) -> None:
    make(self, bucket, CPU, like)


class FakeCuda:
    """What a capture asks of `torch.cuda`. To end one in which something raised raises too, and leaves its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = "default"
        fakes = {
            "Stream": lambda: Mock(),
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": Mock,
            "current_stream": lambda: Mock(name=self.current),
            "set_stream": self.set_stream,
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def set_stream(self, stream: Any) -> None:
        self.current = "restored"

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        self.current = "capturing"
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error
        self.current = "default"


def test_a_capture_that_fails_says_why_and_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, calls = FakeCuda(monkeypatch), []

    def third_time_fails() -> torch.Tensor:
        calls.append(cuda.current)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(1)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        CapturedGraph(third_time_fails, None)
    assert calls == ["default", "default", "capturing"]
    assert cuda.current == "restored"


def test_a_capture_that_ends_well_has_the_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, numbers = FakeCuda(monkeypatch), iter(range(9))
    graph = CapturedGraph(lambda: torch.tensor(next(numbers)), None)
    assert (graph.output.item(), cuda.current) == (2, "default")


@pytest.mark.parametrize("words", ["CUDA out of memory.", "CUDA error: an illegal memory access was encountered"])
def test_other_errors_of_a_capture_are_the_engines(words: str) -> None:
    def fails(function: Any, pool: Any) -> Any:
        raise RuntimeError(words)

    with pytest.raises(RuntimeError, match=words):
        CudaGraphs(sums, CPU, capture=fails).run(pack(ids(4)), EMBED)


@pytest.mark.parametrize("checkpoint", [tiny_llama, tiny_bert])
def test_padded_batches_give_the_rows_of_unpadded_ones(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """A whole model through the interpreter: attention and poolers read the static bounds alone."""
    model = load_pooling_model(EngineConfig(model=str(checkpoint()), device="cpu", use_tqdm_on_load=False)).model
    eager = PoolingModelRunner(model, CPU)
    captured = PoolingModelRunner(model, CPU)
    captured.graphs = CudaGraphs(captured.compute, CPU, capture=FakeGraph)
    for lengths, plans in (
        ((9, 1, 7), [EMBED] * 3),
        ((4, 10, 6), [EMBED] * 3),
        ((9, 1, 7), [CUT] * 3),
        ((9, 1, 7), [EMBED, TOKENS, CUT]),
        ((5,), [TOKENS]),
    ):
        batch = pack(ids(*lengths), skips=[len(lengths) // 2] + [0] * (len(lengths) - 1))
        expected = eager.run(batch, plans)
        with monkeypatch.context() as patch:
            patch.setenv("ANYPOOL_KERNELS", "triton")
            actual = captured.run(batch, plans)
        for one, other in zip(actual.results, expected.results, strict=True):
            assert_close(one, other)
    assert [graph.replays for graph in FakeGraph.made] == [2, 1, 1, 1]
    assert actual.padding_tokens == 16 - 5


def test_a_model_whose_attention_runs_in_groups_is_not_captured() -> None:
    """Its groups are made of lengths that a graph would not know again."""
    model = load_pooling_model(EngineConfig(model=str(tiny_bert()), device="cpu", use_tqdm_on_load=False)).model
    runner = PoolingModelRunner(model, CPU)
    runner.graphs = CudaGraphs(runner.compute, CPU, capture=FakeGraph)
    [alone] = PoolingModelRunner(model, CPU).run(pack(ids(9)), [EMBED]).results
    assert_close(runner.run(pack(ids(9)), [EMBED]).results[0], alone)
    assert len(runner.graphs) == 0


def test_a_pooler_with_a_forward_of_its_own_is_not_in_a_graph() -> None:
    class Doubled(EmbedPooler):
        def forward(self, hidden_TD: Any, segments: Any, plans: Any) -> Any:
            groups = super().forward(hidden_TD, segments, plans)
            return [replace(group, values=2 * group.values) for group in groups]

    model = load_pooling_model(EngineConfig(model=str(tiny_llama()), device="cpu", use_tqdm_on_load=False)).model
    assert model.pooler.graphable(EMBED) is model.pooler[PoolingTask.EMBED]
    model.pooler.install(PoolingTask.EMBED, Doubled((PoolingType.LAST,)))
    assert model.pooler.graphable(EMBED) is None


def test_results_stay_what_they_are_when_the_next_batch_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    model = load_pooling_model(EngineConfig(model=str(tiny_llama()), device="cpu", use_tqdm_on_load=False)).model
    runner = PoolingModelRunner(model, CPU)
    runner.graphs = CudaGraphs(runner.compute, CPU, capture=FakeGraph)
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    for plan in (EMBED, TOKENS):
        [first] = runner.run(pack(ids(9)), [plan]).results
        kept = first.clone()
        runner.run(pack(ids(7, first=20)), [plan])
        assert torch.equal(first, kept)


@pytest.mark.parametrize("lengths", [(15,), (1,), (14, 1), (6, 6)])
def test_a_padding_token_inside_a_text_and_dummies_of_one_token(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id that fills a bucket is one that LAST_NOT_PAD passes over, and texts end in it."""
    pytest.importorskip("triton")
    segments = []

    def last_not_pad(batch: PackedBatch, plan: PoolingPlan | None) -> torch.Tensor:
        segments.append(batch.segments)
        rows = pool(batch.input_ids_T.float()[:, None], batch.segments, (PoolingType.LAST_NOT_PAD,))
        return torch.cat([rows, row_of(PoolingType.LAST_NOT_PAD, batch.segments)[:, None]], dim=1)  # type: ignore[index]

    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    some = CudaGraphs(last_not_pad, CPU, capture=FakeGraph)
    sequences = [[5, 0, *([0] * n)][:n] for n in lengths]
    output = some.run(pack(sequences, pad_token_id=0), EMBED)
    assert output is not None
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert output.values.tolist() == [[5, start] for start in starts]


def test_models_say_whether_they_can_be_captured() -> None:
    load = partial(load_pooling_model)
    model = load(EngineConfig(model=str(tiny_llama()), device="cpu", use_tqdm_on_load=False)).model
    assert can_capture(model, torch.device("cuda"))
    assert not can_capture(model, CPU)
    model.can_capture = False
    assert not can_capture(model, torch.device("cuda"))

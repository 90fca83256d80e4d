"""Pooling a text chunk by chunk gives what pooling it at once gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anypool.pooling.methods import PoolingType, Segments, pool, span_means
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import TokenEmbedPooler, TokenScorePooler
from anypool.pooling.streaming import PoolingState, SpanMeans, pooling_state
from anypool.pooling.tasks import PoolingTask

DIM, PAD, TAG = 12, 0, 1
CPU = torch.device("cpu")
BY_TEXT = [kind for kind in PoolingType if kind not in (PoolingType.ALL, PoolingType.STEP)]

lengths = st.one_of(st.integers(1, 12), st.sampled_from([63, 130]))


@st.composite
def texts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """States, ids with many pads and tags among them, and how many leading tokens are skipped."""
    length = draw(lengths)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows_TD = torch.randn(length, DIM, generator=generator).to(dtype)
    kinds = draw(st.sampled_from([1, 2, 4]))  # of ids: pads alone, pads and tags, others too
    ids_T = torch.randint(0, kinds, (length,), generator=generator)
    return rows_TD, ids_T, draw(st.integers(0, length - 1))


@st.composite
def splits(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes of chunks, some of them empty, that sum to `length`."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def streamed(state: PoolingState, rows_TD: torch.Tensor, ids_T: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    for rows_LD, ids_L in zip(rows_TD.split(sizes), ids_T.split(sizes), strict=True):
        piece_LD = rows_LD.clone()
        state.update(piece_LD, ids_L)
        piece_LD.fill_(float("nan"))  # the next piece may come in the same memory
    assert state.seen == len(rows_TD)
    return state.result()


@pytest.mark.parametrize("kind", BY_TEXT, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_sequence_type_gives_the_same_in_chunks(kind: PoolingType, data: st.DataObject) -> None:
    rows_TD, ids_T, skip = data.draw(texts())
    pad = data.draw(st.sampled_from([PAD, None]))
    [expected] = pool(rows_TD, Segments((len(rows_TD),), (skip,), CPU, ids_T, pad), (kind,))
    state = pooling_state(kind, skip=skip, pad_token_id=pad)
    actual = streamed(state, rows_TD, ids_T, data.draw(splits(len(rows_TD))))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_and_step_keep_the_same_rows_in_chunks(data: st.DataObject) -> None:
    rows_TD, ids_T, skip = data.draw(texts())
    segments = Segments((len(rows_TD),), (skip,), CPU, ids_T, PAD)
    sizes = data.draw(splits(len(rows_TD)))
    [every] = TokenEmbedPooler()(rows_TD, segments, [PoolingPlan(task=PoolingTask.TOKEN_EMBED)])
    assert torch.equal(streamed(pooling_state(PoolingType.ALL, skip=skip), rows_TD, ids_T, sizes), every.values)
    plan = PoolingPlan(task=PoolingTask.REWARD, step_tag_id=TAG)
    [steps] = TokenScorePooler(nn.Identity())(rows_TD, segments, [plan])
    state = pooling_state(PoolingType.STEP, skip=skip, step_tag_id=TAG)
    assert torch.equal(streamed(state, rows_TD, ids_T, sizes), steps.values)
    assert steps.rows == (int((ids_T == TAG).sum()),)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_texts_of_a_batch_are_streamed_one_by_one(data: st.DataObject) -> None:
    batch = data.draw(st.lists(texts(), min_size=2, max_size=5))
    rows_TD = torch.cat([rows.float() for rows, _, _ in batch])
    ids_T = torch.cat([ids for _, ids, _ in batch])
    segments = Segments(tuple(len(rows) for rows, _, _ in batch), tuple(skip for _, _, skip in batch), CPU, ids_T, PAD)
    for kind in BY_TEXT:
        for expected, (rows, ids, skip) in zip(pool(rows_TD, segments, (kind,)), batch, strict=True):
            state = pooling_state(kind, skip=skip, pad_token_id=PAD)
            actual = streamed(state, rows, ids, data.draw(splits(len(rows))))
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_every_type_has_a_state() -> None:
    for kind in PoolingType:
        state = pooling_state(kind, pad_token_id=PAD, step_tag_id=TAG)
        state.update(torch.ones(3, DIM), torch.tensor([TAG, 2, PAD]))
        assert state.result().shape[-1] == DIM


def test_a_state_keeps_one_row_where_that_is_all_it_needs() -> None:
    for kind in BY_TEXT:
        state = pooling_state(kind, pad_token_id=PAD)
        for _ in range(50):
            state.update(torch.randn(40, DIM), torch.full((40,), 2))
        held = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
        assert sum(value.numel() for value in held) == DIM
        assert all(value.untyped_storage().nbytes() <= 4 * DIM for value in held), f"{kind} keeps a chunk alive"


def test_a_result_before_any_pooled_row_is_a_fault_of_ours() -> None:
    for kind in PoolingType:
        with pytest.raises(AssertionError, match="no rows were"):
            pooling_state(kind, pad_token_id=PAD, step_tag_id=TAG).result()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spans_have_the_same_means_in_chunks(data: st.DataObject) -> None:
    rows_TD, ids_T, _ = data.draw(texts())
    length = len(rows_TD)
    starts = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    spans = [(start, data.draw(st.integers(start + 1, length))) for start in starts]
    expected = torch.stack([rows_TD[start:end].double().mean(dim=0).float() for start, end in spans])
    torch.testing.assert_close(span_means(rows_TD, spans), expected, atol=1e-6, rtol=0)
    actual = streamed(SpanMeans(spans), rows_TD, ids_T, data.draw(splits(length)))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)

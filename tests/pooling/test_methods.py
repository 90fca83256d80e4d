"""Pooling types and their kernels against plain loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from anypool.kernels.normalize_cut import normalize_cut
from anypool.kernels.segment_pool import segment_max, segment_rows, segment_sum
from anypool.pooling.methods import PoolingType, Segments, pool

LENGTHS = (7, 1, 130, 63, 1)
SKIPS = (3, 0, 129, 5, 0)
DIM = 33
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rows = list[list[float]]


def _column(function: Callable[[list[float]], float], rows: Rows) -> list[float]:
    return [function([row[d] for row in rows]) for d in range(len(rows[0]))]


def _weighted(rows: Rows, skip: int) -> list[float]:
    weights = [float(skip + i + 1) for i in range(len(rows))]
    return _column(lambda column: math.fsum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights), rows)


# Per type: the pooled rows of one sequence, after the first `skip` were left out -> one row.
LOOPS: dict[PoolingType, Callable[[Rows, int], list[float]]] = {
    PoolingType.CLS: lambda rows, skip: rows[0],
    PoolingType.LAST: lambda rows, skip: rows[-1],
    PoolingType.MEAN: lambda rows, skip: _column(lambda column: math.fsum(column) / len(column), rows),
    PoolingType.MEAN_SQRT_LEN: lambda rows, skip: _column(lambda c: math.fsum(c) / math.sqrt(len(c)), rows),
    PoolingType.MAX: lambda rows, skip: _column(max, rows),
    PoolingType.WEIGHTED_MEAN: _weighted,
}


def looped(
    kind: PoolingType, hidden_TD: torch.Tensor, lengths: tuple[int, ...], skips: tuple[int, ...]
) -> torch.Tensor:
    start, out = 0, []
    for length, skip in zip(lengths, skips, strict=True):
        rows = hidden_TD[start + skip : start + length].double().tolist()
        out.append(LOOPS[kind](rows, skip))
        start += length
    return torch.tensor(out, dtype=torch.float64)


def hidden(dtype: torch.dtype = torch.float32, *, total: int = sum(LENGTHS)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(total, DIM, generator=generator) * 3).to(dtype)


def segments(lengths: tuple[int, ...] = LENGTHS, skips: tuple[int, ...] | None = None) -> Segments:
    return Segments(lengths, skips or (0,) * len(lengths), CPU)


@pytest.mark.parametrize("skips", [(0,) * 5, SKIPS], ids=["all-tokens", "prompt-skipped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_each_type_equals_a_plain_loop(kind: PoolingType, dtype: torch.dtype, skips: tuple[int, ...]) -> None:
    hidden_TD = hidden(dtype)
    pooled_NE = pool(hidden_TD, segments(skips=skips), (kind,))
    assert pooled_NE.dtype == torch.float32
    torch.testing.assert_close(pooled_NE.double(), looped(kind, hidden_TD, LENGTHS, skips), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_non_contiguous_states_are_pooled_alike(kind: PoolingType) -> None:
    wide = hidden().repeat_interleave(2, dim=1)
    transposed = hidden().t().contiguous().t()
    expected = pool(hidden(), segments(), (kind,))
    torch.testing.assert_close(pool(wide[:, ::2], segments(), (kind,)), expected, atol=0, rtol=0)
    torch.testing.assert_close(pool(transposed, segments(), (kind,)), expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_a_sequence_is_pooled_the_same_alone_and_among_others(kind: PoolingType) -> None:
    together = pool(hidden(), segments(skips=SKIPS), (kind,))
    start = 0
    for index, (length, skip) in enumerate(zip(LENGTHS, SKIPS, strict=True)):
        alone = pool(hidden()[start : start + length], segments((length,), (skip,)), (kind,))
        torch.testing.assert_close(alone[0], together[index], atol=0, rtol=0)
        start += length


def test_several_types_are_concatenated_in_the_order_given() -> None:
    kinds = (PoolingType.LAST, PoolingType.MEAN, PoolingType.CLS)
    expected = torch.cat([pool(hidden(), segments(), (kind,)) for kind in kinds], dim=-1)
    torch.testing.assert_close(pool(hidden(), segments(), kinds), expected, atol=0, rtol=0)


def test_one_broken_sequence_does_not_touch_its_neighbours() -> None:
    clean, broken = hidden(), hidden()
    broken[8:138] = float("nan")  # the third sequence
    for kind in LOOPS:
        a, b = pool(clean, segments(), (kind,)), pool(broken, segments(), (kind,))
        assert b[2].isnan().all()
        torch.testing.assert_close(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]], atol=0, rtol=0)


def test_index_tensors_follow_the_segments_or_are_those_that_are_there() -> None:
    some = segments((3, 1, 2), (1, 0, 1))
    assert some.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert some.skips_N is not None
    assert some.skips_N.tolist() == [1, 0, 1]
    assert segments((3, 1, 2)).skips_N is None
    there = Segments((9,), (0,), CPU, bounds_N1=some.cu_seqlens, skipped_N=some.skips_N)
    assert there.cu_seqlens is some.cu_seqlens
    assert there.skips_N is some.skips_N


def test_segment_kernels_reduce_in_float32() -> None:
    rows_TD = hidden(torch.bfloat16)
    lengths_N = torch.tensor(LENGTHS)
    parts = rows_TD.double().split(LENGTHS)
    total, most = segment_sum(rows_TD, lengths_N), segment_max(rows_TD, lengths_N)
    assert total.dtype == most.dtype == torch.float32
    torch.testing.assert_close(total.double(), torch.stack([p.sum(0) for p in parts]), atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(most.double(), torch.stack([p.amax(0) for p in parts]), atol=0, rtol=0)
    index_N = torch.tensor([5, 0, 201])
    torch.testing.assert_close(segment_rows(rows_TD, index_N), rows_TD.float()[index_N], atol=0, rtol=0)


def test_the_maximum_of_all_negative_rows_is_negative() -> None:
    rows_TD = -hidden().abs() - 1
    assert (segment_max(rows_TD, torch.tensor(LENGTHS)) < 0).all()


@pytest.mark.parametrize("dimensions", [None, 1, 8, DIM])
def test_rows_are_cut_before_they_are_normalised(dimensions: int | None) -> None:
    rows_NE = hidden()[:9]
    cut = rows_NE[:, :dimensions]
    normalised = normalize_cut(rows_NE, dimensions=dimensions, normalize=True)
    expected = torch.stack([row / math.sqrt(math.fsum(x * x for x in row.tolist())) for row in cut.double()])
    torch.testing.assert_close(normalised.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(normalize_cut(rows_NE, dimensions=dimensions, normalize=False), cut, atol=0, rtol=0)


def test_zero_rows_stay_zero_when_normalised() -> None:
    rows_NE = torch.zeros(2, 4)
    assert torch.equal(normalize_cut(rows_NE, dimensions=3, normalize=True), torch.zeros(2, 3))
    assert torch.equal(normalize_cut(rows_NE, dimensions=None, normalize=True), F.normalize(rows_NE, dim=-1))

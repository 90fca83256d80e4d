"""The kernel of `segment_pool` gives what plain torch gives; plain torch is held to loops in pooling/test_methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anypool.kernels.segment_pool import METHODS, reference, segment_pool
from anypool.kernels.segment_pool.reference import normalized
from tests.kernels.conftest import ALL_NAN, DTYPES, LENGTHS, assert_near, bounds, random

SKIPS = (3, 0, 63, 0, 129, 5, 0)  # of the third sequence nothing is left


def plain(rows_TD: torch.Tensor, cu_seqlens: torch.Tensor, method: str, **options: Any) -> torch.Tensor:
    normalize, dtype = options.pop("normalize", False), options.pop("dtype", torch.float32)
    pooled_ND = reference.segment_pool(rows_TD, cu_seqlens, method, **options)
    return (normalized(pooled_ND) if normalize else pooled_ND).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skips", [None, SKIPS])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_equals_the_reference_over_ragged_sequences(
    method: Any, normalize: bool, skips: tuple[int, ...] | None, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    rows_TD = random(sum(LENGTHS), 33, device=device, dtype=dtype)
    options: dict[str, Any] = {
        "skips_N": None if skips is None else torch.tensor(skips, dtype=torch.int32, device=device),
        "normalize": normalize,
        "dimensions": 20 if normalize else None,
    }
    actual = segment_pool(rows_TD, bounds(LENGTHS, device), method, **options)
    assert_near(actual, plain(rows_TD, bounds(LENGTHS, device), method, **options), within=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 128, 300])
def test_a_row_leaves_cut_normalised_and_cast(
    size: int, dtype: torch.dtype, kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anypool.kernels.segment_pool import triton

    monkeypatch.setattr(triton, "_PROGRAMS", 2)  # so that one launch does it all
    lengths = (5, 1, 63)
    rows_TD = random(sum(lengths), size, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"normalize": True, "dimensions": max(1, size // 2), "dtype": dtype}
    actual = segment_pool(rows_TD, bounds(lengths, device), "MEAN", **options)
    assert_near(actual, plain(rows_TD, bounds(lengths, device), "MEAN", **options))


@pytest.mark.parametrize("method", METHODS)
def test_tiny_rows_and_rows_below_zero_are_normalised_in_one_launch(
    method: Any, kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a width that leaves columns of the tile over, which must not count in the norm."""
    from anypool.kernels.segment_pool import triton

    monkeypatch.setattr(triton, "_PROGRAMS", 2)
    lengths = (5, 1, 63)
    rows_TD = -1e-6 * random(sum(lengths), 33, device=device).abs() - 1e-7
    options: dict[str, Any] = {"normalize": True, "dimensions": 20}
    actual = segment_pool(rows_TD, bounds(lengths, device), method, **options)
    assert_near(actual, plain(rows_TD, bounds(lengths, device), method, **options))


@ALL_NAN
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_is_seen_in_its_own_sequence_and_nowhere_else(method: Any, kernels: None, device: torch.device) -> None:
    rows_TD = random(24, 5, device=device)
    rows_TD[8:16] = float("nan")
    pooled = segment_pool(rows_TD, bounds((8, 8, 8), device), method)
    assert pooled[1].isnan().all()
    assert pooled[[0, 2]].isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_rows_may_lie_column_by_column(method: Any, kernels: None, device: torch.device) -> None:
    rows_TD = random(33, 24, device=device).T
    cu_seqlens = bounds((8, 16), device)
    assert_near(segment_pool(rows_TD, cu_seqlens, method), plain(rows_TD, cu_seqlens, method))


def test_a_batch_without_sequences_gives_no_rows(kernels: None, device: torch.device) -> None:
    assert segment_pool(torch.randn(0, 4, device=device), bounds((), device), "MEAN").shape == (0, 4)


def test_an_unknown_method_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"'MEDIAN'; known: CLS, LAST, MEAN"):
        segment_pool(torch.randn(2, 4), bounds((2,), torch.device("cpu")), "MEDIAN")  # type: ignore[arg-type]

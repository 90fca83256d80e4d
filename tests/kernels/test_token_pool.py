"""The kernels of `token_pool`, `normalize_cut` and `score_head` give what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anypool.kernels import score_head as score_head_op
from anypool.kernels import token_pool as token_pool_op
from anypool.kernels.normalize_cut import normalize_cut
from anypool.kernels.score_head import ACTIVATIONS, score_head
from anypool.kernels.token_pool import FINISHES, token_pool
from tests.kernels.conftest import ALL_NAN, DTYPES, assert_near, random

KEPT = torch.tensor([129, 0, 5, 5, 64])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("size", [1, 33, 300])
@pytest.mark.parametrize("finish", FINISHES)
def test_every_row_is_finished(
    finish: Any, size: int, rows: int, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    rows_TD = random(rows, size, device=device, dtype=dtype)
    options: dict[str, Any] = {"index_S": None, "dimensions": max(1, size - 2), "finish": finish}
    assert_near(token_pool(rows_TD, **options), token_pool_op.reference.token_pool(rows_TD, **options))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("index", [KEPT, KEPT[:0]])
@pytest.mark.parametrize("finish", FINISHES)
def test_kept_rows_are_gathered_and_cast(
    finish: Any, index: torch.Tensor, out: torch.dtype, kernels: None, device: torch.device
) -> None:
    rows_TD = random(130, 65, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"index_S": index.to(device), "finish": finish}
    expected = token_pool_op.reference.token_pool(rows_TD, dimensions=None, **options).to(out)
    assert_near(token_pool(rows_TD, dtype=out, **options), expected)


def test_rows_are_cut_before_they_are_normalised(kernels: None, device: torch.device) -> None:
    rows_NE = random(9, 40, device=device)
    assert_near(normalize_cut(rows_NE, dimensions=7, normalize=True), F.normalize(rows_NE[:, :7], dim=-1))
    assert torch.equal(normalize_cut(torch.zeros(2, 4, device=device), normalize=True), torch.zeros(2, 4).to(device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [1, 3, 17, 40])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_scores_equal_a_linear_layer_and_what_follows_it(
    activation: str, labels: int, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    rows_TD = random(130, 300, device=device, dtype=dtype)
    weight_CD = random(labels, 300, device=device, seed=1) * 0.1
    options: dict[str, Any] = {"index_N": KEPT.to(device), "mean": 0.3, "sigma": 1.7, "activation": activation}
    bias_C = random(labels, device=device, seed=2)
    actual = score_head(rows_TD, weight_CD, bias_C, **options)
    assert_near(actual, score_head_op.reference.score_head(rows_TD, weight_CD, bias_C, **options), within=5e-6)


@pytest.mark.parametrize("rows", [0, 1, 63])
def test_all_rows_are_scored_without_bias_nor_calibration(rows: int, kernels: None, device: torch.device) -> None:
    rows_TD, weight_CD = random(rows, 33, device=device), random(2, 33, device=device)
    assert_near(score_head(rows_TD, weight_CD), F.linear(rows_TD, weight_CD), within=1e-5)


@ALL_NAN
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_comes_through_every_activation(activation: str, kernels: None, device: torch.device) -> None:
    rows_TD = torch.full((1, 4), float("nan"), device=device)
    assert score_head(rows_TD, torch.ones(2, 4, device=device), activation=activation).isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("base", [-1e30, -200.0, 200.0, 1e30])
def test_numbers_far_from_zero_weigh_as_those_near_it(base: float, kernels: None, device: torch.device) -> None:
    rows_TD = torch.full((3, 5), base, device=device)
    rows_TD[1, 2] += 3.0
    assert_near(token_pool(rows_TD, finish="softmax"), rows_TD.softmax(-1))
    one_CD = torch.eye(5, device=device)
    for activation, function in ACTIVATIONS.items():
        assert_near(score_head(rows_TD, one_CD, activation=activation), function(rows_TD))


def test_tiny_rows_are_scaled_like_others_and_rows_of_next_to_nothing_are_not(
    kernels: None, device: torch.device
) -> None:
    rows_TD = torch.tensor([[3e-6, 4e-6], [3e-13, 4e-13], [0.0, 0.0]], device=device)
    assert_near(token_pool(rows_TD, finish="normalize"), F.normalize(rows_TD, dim=-1, eps=1e-12))


def test_where_rows_and_biases_are_listed_need_not_be_contiguous(kernels: None, device: torch.device) -> None:
    rows_TD, weight_CD = random(9, 33, device=device), random(3, 33, device=device, seed=1)
    index = torch.tensor([8, 0, 1, 7, 2, 3], device=device)[::2]
    bias_C = random(6, device=device, seed=2)[::2]
    assert_near(token_pool(rows_TD, index_S=index), rows_TD[[8, 1, 2]])
    expected = F.linear(rows_TD[[8, 1, 2]], weight_CD, bias_C)
    assert_near(score_head(rows_TD, weight_CD, bias_C, index_N=index), expected, within=1e-5)


def test_unknown_names_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="'exp'; known: none, normalize, softmax"):
        token_pool(torch.randn(2, 4), finish="exp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'exp'; known: none, sigmoid"):
        score_head(torch.randn(2, 4), torch.randn(1, 4), activation="exp")

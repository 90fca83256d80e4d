"""MaxSim is what a plain loop over the tokens gives, and its kernel gives the same."""

from __future__ import annotations

import pytest
import torch

from anypool.kernels.maxsim import maxsim, maxsim_pairs, reference
from tests.helpers import assert_close
from tests.kernels.conftest import ALL_NAN, DTYPES, bounds, random

LENGTHS = [1, 7, 63, 130]


def loop(query_QE: torch.Tensor, document_DE: torch.Tensor) -> float:
    total = 0.0
    for query_E in query_QE.double():
        total += max(float((query_E * token_E).sum()) for token_E in document_DE.double())
    return total


def tokens(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(count, size), dim=-1).to(dtype)


@pytest.mark.parametrize("document", LENGTHS)
@pytest.mark.parametrize("query", LENGTHS)
def test_maxsim_equals_a_loop_over_ragged_lengths(query: int, document: int) -> None:
    torch.manual_seed(query * 1000 + document)
    query_QE, document_DE = tokens(query, 33), tokens(document, 33)
    assert_close(maxsim(query_QE, document_DE), torch.tensor(loop(query_QE, document_DE)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    query_QE, document_DE = tokens(63, 17, dtype), tokens(130, 17, dtype)
    score = maxsim(query_QE, document_DE)
    assert score.dtype is torch.float32
    assert_close(score, torch.tensor(loop(query_QE, document_DE)))


def test_rows_need_not_be_contiguous_nor_alike_in_dtype() -> None:
    torch.manual_seed(2)
    query_QE, document_DE = tokens(24, 14).T[::2], tokens(24, 21, torch.bfloat16).T
    assert_close(maxsim(query_QE, document_DE), torch.tensor(loop(query_QE, document_DE)))


def test_the_largest_product_counts_even_where_all_are_negative() -> None:
    query_QE = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    document_DE = torch.tensor([[-3.0, -1.0], [-2.0, -4.0]])
    assert maxsim(query_QE, document_DE).item() == -3.0


def test_long_texts_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    query_QE, document_DE = tokens(100, 16), tokens(130, 16)
    whole = maxsim(query_QE, document_DE)
    monkeypatch.setattr(reference, "_PRODUCTS", 7 * 130 + 5)
    assert_close(maxsim(query_QE, document_DE), whole)
    monkeypatch.setattr(reference, "_PRODUCTS", 1)
    assert_close(maxsim(query_QE, document_DE), whole)


def test_a_query_without_tokens_scores_nothing() -> None:
    assert maxsim(torch.empty(0, 4), torch.randn(3, 4)).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 130])
def test_ragged_pairs_equal_one_pair_at_a_time(
    size: int, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    queries, documents = (7, 0, 1, 63, 130), (1, 63, 7, 1000)
    queries_QE = random(sum(queries), size, device=device, dtype=dtype)
    documents_DE = random(sum(documents), size, device=device, dtype=dtype, seed=1)
    pairs_P2 = torch.tensor([(i, j) for i in range(5) for j in (3, 0, 2)], device=device)
    packed = queries_QE, bounds(queries, device), documents_DE, bounds(documents, device), pairs_P2
    expected = reference.maxsim_pairs(*packed)
    # float32 sums of other orders, over queries of up to 130 tokens
    torch.testing.assert_close(maxsim_pairs(*packed), expected, atol=1e-4, rtol=1e-5)
    one = maxsim(queries_QE[8:71], documents_DE[1:64])
    torch.testing.assert_close(one, reference.maxsim(queries_QE[8:71], documents_DE[1:64]), atol=1e-4, rtol=1e-5)


def test_pairs_may_be_a_part_of_a_table(kernels: None, device: torch.device) -> None:
    rows, cu_seqlens = random(8, 5, device=device), bounds((3, 5), device)
    table_P3 = torch.tensor([[0, 1, 9], [1, 1, 9], [1, 0, 9]], device=device)
    packed = rows, cu_seqlens, rows, cu_seqlens, table_P3[:, :2]
    torch.testing.assert_close(maxsim_pairs(*packed), reference.maxsim_pairs(*packed), atol=1e-5, rtol=1e-5)


def test_no_pairs_give_no_scores(kernels: None, device: torch.device) -> None:
    rows, cu_seqlens = random(3, 4, device=device), bounds((3,), device)
    none = torch.empty(0, 2, dtype=torch.int64, device=device)
    assert maxsim_pairs(rows, cu_seqlens, rows, cu_seqlens, none).shape == (0,)


@ALL_NAN
def test_a_nan_is_not_passed_over(kernels: None, device: torch.device) -> None:
    query_QE, document_DE = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    document_DE[1, 0] = float("nan")
    assert maxsim(query_QE, document_DE).isnan()

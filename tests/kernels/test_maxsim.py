"""MaxSim is what a plain loop over the tokens gives."""

from __future__ import annotations

import pytest
import torch

from anypool.kernels.maxsim import maxsim
from tests.helpers import assert_close

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


def test_a_query_without_tokens_scores_nothing() -> None:
    assert maxsim(torch.empty(0, 4), torch.randn(3, 4)).item() == 0.0

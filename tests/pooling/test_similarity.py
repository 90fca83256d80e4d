"""Similarities are those of sentence-transformers, pair by pair."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.util import SimilarityFunction

from anypool.errors import CheckpointFormatError
from anypool.pooling.similarity import SIMILARITIES, similarity
from tests.helpers import assert_close

NAMES = [function.value for function in SimilarityFunction]


def test_the_names_are_those_of_the_reference() -> None:
    assert set(SIMILARITIES) == {"cosine", "dot", "euclidean", "manhattan"} <= set(NAMES)


@pytest.mark.parametrize("name", SIMILARITIES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 63), (130, 48)])
def test_each_equals_the_reference(name: str, rows: int, size: int) -> None:
    torch.manual_seed(0)
    a_NE, b_NE = torch.randn(rows, size), torch.randn(size, rows).T  # the second is not contiguous
    b_NE[-1] = a_NE[-1]
    expected_N = SimilarityFunction.to_similarity_pairwise_fn(name)(a_NE, b_NE)
    assert_close(similarity(name)(a_NE, b_NE), expected_N)
    assert_close(similarity(name)(b_NE, a_NE), expected_N)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_zero_vectors_have_a_similarity(name: str) -> None:
    zeros_NE = torch.zeros(2, 5)
    assert similarity(name)(zeros_NE, zeros_NE).tolist() == [0.0, 0.0]


def test_cosine_is_taken_where_none_is_named() -> None:
    assert similarity(None) is SIMILARITIES["cosine"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match="'jaccard'; known: cosine, dot, euclidean, manhattan"):
        similarity("jaccard")

"""Hierarchical token pooling gives what each of the libraries gives that its variants are named after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from anypool.errors import InvalidParameterError, MissingDependencyError
from anypool.pooling import token_pooling as module
from anypool.pooling.token_pooling import TOKEN_POOLINGS, TokenPooling, pool_tokens, token_pooling
from tests.helpers import assert_close

# What PyLate 1.6.0 and 1.3.4 and colpali-engine 0.3.18 make of the same rows, by tests/fixtures/make_colbert.py.
STORED = load_file(Path(__file__).parents[1] / "fixtures" / "token_pooling.safetensors")


@pytest.mark.parametrize("factor", [2, 3, 50])
@pytest.mark.parametrize("name", ["pylate", "pylate-1.3", "colpali"])
def test_a_variant_is_its_librarys(name: str, factor: int) -> None:
    assert_close(pool_tokens(STORED["rows"], token_pooling(name, factor)), STORED[f"{name}.{factor}"], atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 7.0])
@pytest.mark.parametrize("rows", [1, 2, 3, 23])
def test_the_variant_of_sentence_transformers_is_its_module(rows: int, factor: float) -> None:
    expected = HierarchicalTokenPooling(factor).pool_one(STORED["rows"][:rows])
    assert_close(
        pool_tokens(STORED["rows"][:rows], token_pooling("sentence-transformers", factor)), expected, atol=1e-6
    )


def test_rows_that_are_equal_become_one() -> None:
    rows = STORED["rows"][:1].expand(6, -1)
    for name in TOKEN_POOLINGS:
        pooled = pool_tokens(rows, token_pooling(name, 2))
        assert 1 <= len(pooled) <= 4
        assert_close(pooled, rows[: len(pooled)], atol=1e-6)


@pytest.mark.parametrize("name", TOKEN_POOLINGS)
def test_no_row_and_one_row_stay_as_they_are(name: str) -> None:
    for rows in (torch.empty(0, 8), STORED["rows"][:1]):
        assert_close(pool_tokens(rows, token_pooling(name, 2)), rows, atol=1e-6)


def test_what_is_unknown_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match="token_pooling='kmeans' is unknown; known: sentence-transformers"):
        token_pooling("kmeans", 2)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"needs scipy: pip install 'anypool\[token-pooling\]'"):
        token_pooling("pylate", 2)
    assert token_pooling("pylate", 1) == TokenPooling()

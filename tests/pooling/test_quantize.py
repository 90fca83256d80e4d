"""Quantised embeddings equal sentence-transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.util.quantization import quantize_embeddings as reference

from anypool.errors import InvalidParameterError
from anypool.pooling.quantize import quantize_embeddings, quantize_token_embeddings

ROWS = np.random.default_rng(0).normal(size=(37, 48)).astype(np.float32)
CALIBRATION = np.random.default_rng(1).normal(size=(200, 48)).astype(np.float32)
RANGES = np.stack([np.full(48, -1.5), np.full(48, 1.25)]).astype(np.float32)


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize(
    "source", [{}, {"ranges": RANGES}, {"calibration_embeddings": CALIBRATION}], ids=["self", "ranges", "calibration"]
)
@pytest.mark.filterwarnings("ignore")
def test_it_equals_sentence_transformers(precision: str, source: dict[str, Any]) -> None:
    ours = quantize_embeddings(ROWS, precision, **source)
    theirs = reference(ROWS, precision, **source)
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("source", [{}, {"ranges": RANGES}], ids=["self", "ranges"])
@pytest.mark.filterwarnings("ignore")
def test_token_vectors_of_ragged_texts_are_those_of_all_rows_together(precision: str, source: dict[str, Any]) -> None:
    texts = [torch.from_numpy(ROWS[start:stop]) for start, stop in ((0, 1), (1, 30), (30, 30), (30, 37))]
    stored = quantize_token_embeddings(texts, precision, **source)
    assert [len(one) for one in stored] == [1, 29, 0, 7]
    assert np.array_equal(np.concatenate(stored), reference(ROWS, precision, **source))
    by_others = quantize_token_embeddings(texts, precision, calibration_embeddings=[CALIBRATION[:90], CALIBRATION[90:]])
    expected = reference(ROWS, precision, calibration_embeddings=CALIBRATION)
    assert np.array_equal(np.concatenate(by_others), expected)
    assert quantize_token_embeddings([], precision) == []
    with pytest.raises(InvalidParameterError, match="embeddings have vectors of 47, 48 dimensions"):
        quantize_token_embeddings([ROWS, ROWS[:, 1:]], precision)


def test_a_constant_dimension_does_not_divide_by_zero() -> None:
    rows = ROWS.copy()
    rows[:, 3] = 0.5
    assert np.array_equal(quantize_embeddings(rows, "uint8"), reference(rows, "uint8"))


def test_tensors_and_lists_of_rows_give_the_same() -> None:
    expected = quantize_embeddings(ROWS, "binary")
    assert np.array_equal(quantize_embeddings(torch.from_numpy(ROWS), "binary"), expected)
    assert np.array_equal(quantize_embeddings(list(ROWS), "binary"), expected)


def test_dimensions_that_do_not_fill_a_byte_are_padded_with_zeros() -> None:
    rows = ROWS[:, :13]
    assert np.array_equal(quantize_embeddings(rows, "ubinary"), reference(rows, "ubinary"))


def test_half_precision_is_the_nearest() -> None:
    assert np.array_equal(quantize_embeddings(ROWS, "float16"), ROWS.astype(np.float16))


@pytest.mark.parametrize(
    ("rows", "precision", "source", "message"),
    [
        (ROWS, "int4", {}, "precision='int4' is unknown; known: float32"),
        (ROWS[:1], "int8", {}, r"cannot take its ranges from 1 embedding: pass ranges="),
        (ROWS, "int8", {"ranges": RANGES[:, :3]}, r"ranges have the shape \[2, 3\]"),
        (ROWS[0], "int8", {}, "must be a matrix of floats"),
        (ROWS.astype(np.int32), "int8", {}, "must be a matrix of floats"),
        (None, "int8", {}, "embeddings must be a matrix of floats, .* got NoneType"),
        ([[1.0, 2.0], [3.0]], "int8", {}, "all of one length; got list"),
        (["a", "b"], "int8", {}, "must be a matrix of floats"),
        (
            np.full((2, 8), np.nan),
            "int8",
            {},
            "embeddings have NaN or infinity in row 0, for which precision='int8' has no value",
        ),
        (np.array([[0.0], [np.inf]]), "ubinary", {}, "embeddings have NaN or infinity in row 1"),
        (ROWS, "int8", {"ranges": "abc"}, "ranges must be a matrix of floats"),
        (ROWS, "int8", {"ranges": RANGES[::-1]}, "ranges have a lowest value above the highest in dimension 0"),
        (ROWS, "int8", {"ranges": RANGES * np.nan}, "ranges have NaN or infinity"),
        (ROWS, "int8", {"calibration_embeddings": ROWS[:0]}, "cannot take its ranges from 0 embedding"),
    ],
)
def test_bad_input_is_named(rows: Any, precision: str, source: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        quantize_embeddings(rows, precision, **source)

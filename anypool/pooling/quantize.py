"""Smaller embeddings, with the formulas of sentence-transformers' `quantize_embeddings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypool.errors import InvalidParameterError

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")

Embeddings = NDArray[Any] | torch.Tensor | Sequence[NDArray[Any]] | Sequence[torch.Tensor]


def quantize_embeddings(
    embeddings: Embeddings,
    precision: str,
    *,
    ranges: NDArray[Any] | torch.Tensor | None = None,
    calibration_embeddings: Embeddings | None = None,
) -> NDArray[Any]:
    """Stores embeddings in fewer bytes.

    int8 and uint8 cut each dimension's range into 256 steps: `floor((x - low) / ((high - low) / 255))`, clipped to
    0..255, and shifted by -128 for int8. binary and ubinary keep one bit per dimension, 1 where x > 0, eight to a byte
    with the first dimension in the highest bit; binary shifts the byte by -128.

    Args:
        embeddings: `[N, E]`, float.
        precision: One of `PRECISIONS`.
        ranges: `[2, E]` lowest and highest value per dimension, for int8 and uint8.
        calibration_embeddings: `[M, E]` from which the ranges are taken where none are given.

    Returns:
        `[N, E]`; for binary and ubinary `[N, ceil(E / 8)]`.

    Raises:
        InvalidParameterError: The precision is unknown, shapes do not fit, a value that is to be binned is not finite,
            or int8 has nothing to take ranges from.
    """
    rows_NE = _matrix(embeddings, "embeddings")
    if precision in ("float32", "float16"):
        return np.asarray(rows_NE, dtype=np.float32 if precision == "float32" else np.float16)
    if precision in PRECISIONS:
        _refuse_non_finite(rows_NE, "embeddings", precision)
    if precision in ("int8", "uint8"):
        low_E, step_E = _steps(rows_NE, precision, ranges, calibration_embeddings)
        levels_NE: NDArray[Any] = np.clip(np.floor((rows_NE - low_E) / step_E), 0, 255)
        return levels_NE.astype(np.uint8) if precision == "uint8" else (levels_NE - 128).astype(np.int8)
    if precision in ("binary", "ubinary"):
        bytes_NB = np.packbits(rows_NE > 0, axis=-1)
        return bytes_NB if precision == "ubinary" else (bytes_NB.astype(np.int16) - 128).astype(np.int8)
    raise InvalidParameterError(
        f"precision={precision!r} is unknown; known: {', '.join(PRECISIONS)}", param="precision"
    )


def quantize_token_embeddings(
    embeddings: Sequence[NDArray[Any]] | Sequence[torch.Tensor],
    precision: str,
    *,
    ranges: NDArray[Any] | torch.Tensor | None = None,
    calibration_embeddings: Sequence[NDArray[Any]] | Sequence[torch.Tensor] | None = None,
) -> list[NDArray[Any]]:
    """`quantize_embeddings` for the token vectors of several texts, each of which has as many as it has.

    Args:
        embeddings: `[tokens, E]` of each text, float.
        precision: One of `PRECISIONS`.
        ranges: As there; without them and calibration embeddings int8 and uint8 take those of all texts together.
        calibration_embeddings: Token vectors of other texts, from which the ranges are taken.

    Returns:
        As there, of each text.

    Raises:
        InvalidParameterError: As there.
    """
    if len(embeddings) == 0:
        return []
    rows = quantize_embeddings(
        _joined(embeddings, "embeddings"),
        precision,
        ranges=ranges,
        calibration_embeddings=(
            None if calibration_embeddings is None else _joined(calibration_embeddings, "calibration_embeddings")
        ),
    )
    return np.split(rows, np.cumsum([len(one) for one in embeddings])[:-1])


def _joined(texts: Sequence[Any], name: str) -> NDArray[Any]:
    """The rows of several texts as one matrix."""
    matrices = [_matrix(one, name) for one in texts]
    sizes = sorted({one.shape[1] for one in matrices})
    if len(sizes) > 1:
        raise InvalidParameterError(
            f"{name} have vectors of {', '.join(map(str, sizes))} dimensions: give those of one model", param=name
        )
    return np.concatenate(matrices)


def _steps(
    rows_NE: NDArray[Any], precision: str, ranges: Any, calibration: Embeddings | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    if ranges is None:
        source = rows_NE if calibration is None else _matrix(calibration, "calibration_embeddings")
        if len(source) < (2 if calibration is None else 1):
            raise InvalidParameterError(
                f"precision={precision!r} cannot take its ranges from {len(source)} embedding: "
                "pass ranges= or calibration_embeddings=",
                param="precision",
            )
        ranges = np.stack([source.min(axis=0), source.max(axis=0)])
    ranges_2E = _numbers(ranges, "ranges").astype(np.float32)
    if ranges_2E.shape != (2, rows_NE.shape[1]):
        raise InvalidParameterError(
            f"ranges have the shape {list(ranges_2E.shape)}; embeddings of {rows_NE.shape[1]} dimensions need "
            f"[2, {rows_NE.shape[1]}]",
            param="ranges",
        )
    _refuse_non_finite(ranges_2E, "ranges", precision)
    if (ranges_2E[0] > ranges_2E[1]).any():
        raise InvalidParameterError(
            f"ranges have a lowest value above the highest in dimension {int((ranges_2E[0] > ranges_2E[1]).argmax())}: "
            "the first row is the lowest values, the second the highest",
            param="ranges",
        )
    step_E = (ranges_2E[1] - ranges_2E[0]) / 255
    return ranges_2E[0], np.where(step_E == 0, 1, step_E)


def _matrix(embeddings: Any, name: str) -> NDArray[Any]:
    matrix = _numbers(embeddings, name)
    if matrix.size == 0 and matrix.ndim == 1:
        return np.zeros((0, 0), dtype=np.float32)
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.floating):
        raise InvalidParameterError(
            f"{name} must be a matrix of floats, one row each; got shape {list(matrix.shape)}, {matrix.dtype}",
            param=name,
        )
    return matrix


def _numbers(values: Any, name: str) -> NDArray[Any]:
    """Arrays, tensors, and lists of either as one array of numbers."""
    if isinstance(values, torch.Tensor):
        return values.detach().float().cpu().numpy()
    try:
        rows = values if isinstance(values, np.ndarray) else [_row(row) for row in values]
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:  # nothing to iterate over, or rows of several lengths
        raise InvalidParameterError(
            f"{name} must be a matrix of floats, one row each, all of one length; got {type(values).__name__}: {error}",
            param=name,
        ) from error
    if not np.issubdtype(array.dtype, np.number):
        raise InvalidParameterError(
            f"{name} must be a matrix of floats, one row each; got shape {list(array.shape)}, {array.dtype}", param=name
        )
    return array


def _row(row: Any) -> Any:
    return row.detach().float().cpu().numpy() if isinstance(row, torch.Tensor) else row


def _refuse_non_finite(rows_NE: NDArray[Any], name: str, precision: str) -> None:
    finite_NE = np.isfinite(rows_NE)
    if not finite_NE.all():
        raise InvalidParameterError(
            f"{name} have NaN or infinity in row {int((~finite_NE).any(axis=1).argmax())}, for which "
            f"precision={precision!r} has no value",
            param=name,
        )

"""How vectors are stored: the precision, and the ranges that eight bits take from the first of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypool.errors import InvalidParameterError
from anypool.pooling.quantize import quantize_embeddings

# The precisions that divide a range of values, which has to come from somewhere.
RANGED = ("int8", "uint8")


class Storing:
    """Stores vectors in a precision.

    Args:
        precision: One of `anypool.pooling.quantize.PRECISIONS`.
        calibration: A .npy file of float vectors that int8 and uint8 take their ranges from. Without it they come from
            the first vectors that are stored, which is said.

    Attributes:
        ranges_2E: The lowest and the highest value of each dimension; None where there are none, or not yet.
    """

    def __init__(self, precision: str = "float32", calibration: str | None = None) -> None:
        if calibration is not None and precision not in RANGED:
            raise InvalidParameterError(
                f"--calibration has no meaning for --precision {precision}; it goes with {' and '.join(RANGED)}"
            )
        self.precision, self.calibration = precision, calibration
        self.ranges_2E: NDArray[Any] | None = None if calibration is None else _ranges(_read_vectors(calibration))

    @property
    def needs_ranges(self) -> bool:
        """Whether the next vectors give the ranges."""
        return self.precision in RANGED and self.ranges_2E is None

    def check_enough(self, texts: int) -> None:
        """Refuses to take ranges from so many texts, where that is too few."""
        if self.needs_ranges and texts < 2:
            raise InvalidParameterError(
                f"--precision {self.precision} cannot take its ranges from fewer than two texts: "
                "give --calibration FILE, a .npy of float vectors"
            )

    def store(self, vectors_NE: NDArray[np.float32]) -> NDArray[Any]:
        """The vectors as they are stored, `[N, E]` or `[N, ceil(E / 8)]`."""
        if self.needs_ranges and len(vectors_NE):
            self.check_enough(len(vectors_NE))
            self.ranges_2E = _ranges(vectors_NE)
            print(
                f"anypool: {self.precision} takes its ranges from these {len(vectors_NE):,} texts; "
                "give the --calibration of other files to compare with them",
                file=sys.stderr,
            )
        if self.needs_ranges:
            return vectors_NE.astype(self.precision)  # no rows
        return quantize_embeddings(vectors_NE, self.precision, ranges=self.ranges_2E)


def _ranges(vectors_NE: NDArray[Any]) -> NDArray[Any]:
    return np.stack([vectors_NE.min(axis=0), vectors_NE.max(axis=0)])


def _read_vectors(file: str) -> NDArray[Any]:
    try:
        with Path(file).open("rb") as opened:
            vectors_NE: NDArray[Any] = np.load(opened, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidParameterError(f"--calibration {file} is not a .npy file: {error}") from error
    if vectors_NE.ndim != 2 or not len(vectors_NE) or not np.issubdtype(vectors_NE.dtype, np.floating):
        raise InvalidParameterError(
            f"--calibration {file} has shape {list(vectors_NE.shape)}, {vectors_NE.dtype}: "
            "it must be a matrix of floats, one vector per row"
        )
    return vectors_NE

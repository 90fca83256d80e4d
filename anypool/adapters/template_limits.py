"""Bounds for templates that strangers write: a template is a program, and its sandbox says nothing of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Seconds that the templates of a request may run.
LONGEST_RENDER_S = 5.0
# Characters, items or decimal digits that an operator may make: chat templates repeat a blank a few times.
_LARGEST_PRODUCT = 1_000_000
# Bits of a decimal digit, rounded up.
_BITS_PER_DIGIT = 4


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stops Python code of this thread, wherever it is, by raising `TimeoutError` after so many seconds.

    It looks at the clock at every line, so code in it runs several times slower. What runs in C is not stopped.
    """
    end = time.monotonic() + seconds

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it runs for more than {seconds:g} seconds")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def refuse_endless(operator: str, left: Any, right: Any) -> None:
    """Refuses a product or a power that would take all memory, or minutes in which nothing else runs.

    Raises:
        OverflowError: It is one.
    """
    if operator == "*":
        size = max(_repeated(left, right), _repeated(right, left), (_bits(left) + _bits(right)) // _BITS_PER_DIGIT)
    else:
        size = _bits(left) * abs(right) // _BITS_PER_DIGIT if isinstance(right, int) else 0
    if size > _LARGEST_PRODUCT:
        raise OverflowError(f"{operator!r} gives more than {_LARGEST_PRODUCT:,} characters or digits")


def _repeated(value: Any, times: Any) -> int:
    """The length of a sequence that is repeated; 0 for anything else."""
    return len(value) * times if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0

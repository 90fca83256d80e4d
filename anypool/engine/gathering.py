"""Waiting a moment for callers who have just had their answers, so that they share the next batch."""

from __future__ import annotations

import time

# Most that is waited, of the time that the last batch took.
_SHARE = 0.25
# After so many waits in a row for callers of whom fewer than half came, so many batches go without one.
_MISSES, _PAUSE = 3, 30


class Gathering:
    """Decides how long the device waits for the callers of the batch that has just ended.

    Most callers ask again as soon as they have their answer. If the next batch began with the first of them, it would
    run almost alone, and slowly: where the model computes on all cores, taking in the others' requests takes its time.
    So the device waits until as many calls have come as were answered, or until no more seem to come. What does not
    come at once is not waited for long, nor often.

    The engine's lock guards it.

    Args:
        is_on: Whether to wait at all.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._expected = self._came = self._misses = self._left_out = 0
        self._until = 0.0

    def batch_ended(self, seconds: float) -> None:
        """A batch that took so long is about to be answered."""
        self._expected = self._came = 0
        self._until = time.monotonic() + _SHARE * seconds if self._is_on else 0.0

    def answered(self) -> None:
        """A caller gets its answer."""
        self._expected += 1

    def came(self) -> None:
        """A call has come."""
        self._came += 1

    def end(self) -> None:
        """No more seem to come."""
        self._until = 0.0

    def wait_s(self, *, is_full: bool) -> float:
        """Seconds until the next batch is taken, at most; 0 to take it now, as where enough waits to fill it."""
        if is_full or self._left_out or self._came >= self._expected:
            return 0.0
        return max(0.0, self._until - time.monotonic())

    def batch_began(self) -> None:
        """A batch was taken: learns whether it was worth it to wait."""
        if self._left_out:
            self._left_out -= 1
        elif self._is_on and self._expected:
            self._misses = self._misses + 1 if 2 * self._came < self._expected else 0
            if self._misses == _MISSES:
                self._misses, self._left_out = 0, _PAUSE
        self._expected = 0

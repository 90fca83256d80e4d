"""How long to wait for another process before it is taken to hang."""

from __future__ import annotations

import time

# Seconds between looks at whether a process has said something, and between the signs of life that it gives.
LOOK_S = 1.0
# Seconds that a process gets to start, before it says its first word.
START_S = 180.0
# On a busy machine a sign of life may be late by so many seconds.
_LEAST_S = 5.0


def patience_s(stuck_after_s: float) -> float:
    """Seconds of silence after which a process is taken to hang.

    A forward pass, however long, is no silence: signs of life come from a thread of their own. So a process that gives
    none is stopped, or something in it never lets go of the interpreter.
    """
    return max(stuck_after_s, _LEAST_S)


class AwakeClock:
    """Counts the seconds for which this process runs.

    Where the whole machine was suspended, or this process stopped, those whom it watches were as well: that time is not
    theirs. So one step of the clock is never longer than a look should take.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        """Moves it on; to be called once in `LOOK_S`, or more often."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * LOOK_S)
        self._last = now

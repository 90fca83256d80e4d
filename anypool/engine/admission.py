"""Whether the queue takes more: by what waits in it, and by how long the wait would be at the measured speed."""

from __future__ import annotations

from anypool.config import EngineConfig
from anypool.engine.scheduler import Scheduler
from anypool.errors import OverloadedError


class Admission:
    """The bounds of a queue.

    Args:
        scheduler: The queue.

    Attributes:
        tokens_per_s: The device's speed; 0 while it is unknown.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.tokens_per_s = 0.0
        self._scheduler = scheduler
        self._last_end = 0.0

    def ran(self, tokens: int, *, began: float, ended: float, is_full: bool) -> None:
        """Learns from a batch that has run. The time that it shared with the one before is counted once.

        Args:
            tokens: What was computed.
            began, ended: When, on one clock.
            is_full: Whether it left others waiting: such batches are as full as they get, and tell the speed.
        """
        if is_full:
            speed = tokens / max(ended - max(began, self._last_end), 1e-6)
            self.tokens_per_s = 0.9 * self.tokens_per_s + 0.1 * speed if self.tokens_per_s else speed
        self._last_end = ended

    def refusal(self, tokens: int, priority: int, config: EngineConfig) -> OverloadedError | None:
        """Why the queue does not take so many more tokens, if it does not. An empty one takes any number."""
        waiting = self._scheduler.waiting_tokens
        if waiting and waiting + tokens > config.max_queued_tokens:
            message = (
                f"{waiting:,} tokens are waiting, and the queue takes {config.max_queued_tokens:,}: try again later"
            )
            return OverloadedError(message, retry_after_s=_retry_after(waiting / max(self.tokens_per_s, 1.0)))
        if self.tokens_per_s and config.max_queue_s is not None:
            wait_s = self._scheduler.tokens_before(tokens, priority) / self.tokens_per_s
            if wait_s > config.max_queue_s:
                message = f"the turn would come in {wait_s:,.1f} s, and the limit is {config.max_queue_s:g} s"
                return OverloadedError(
                    f"{message}: try again later", retry_after_s=_retry_after(wait_s - config.max_queue_s)
                )
        return None


def _retry_after(seconds: float) -> float:
    return min(600.0, max(1.0, seconds))

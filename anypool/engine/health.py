"""What the device thread is doing, as it looks from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Health:
    """The engine's state.

    Attributes:
        status: "alive" (waits for work), "busy" (runs a batch), "stuck" (runs one for longer than `stuck_after_s`)
            or "dead" (closed, or its thread has died).
        age_s: Seconds since the device thread began its batch, or began to wait.
        waiting_requests, waiting_tokens: What is queued.
        message: What is wrong, where it is stuck or dead, or some of its replicas are.
        replicas: How many engines take requests.
    """

    status: Literal["alive", "busy", "stuck", "dead"]
    age_s: float
    waiting_requests: int
    waiting_tokens: int
    message: str = ""
    replicas: int = 1

    @property
    def is_ready(self) -> bool:
        """Whether requests are run."""
        return self.status in ("alive", "busy") and self.replicas > 0

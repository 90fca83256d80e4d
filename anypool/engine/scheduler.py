"""Which requests run next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from anypool.engine.request import Request


class Scheduler:
    """Requests of near lengths under a token budget, around the one that has waited longest.

    The oldest request is in every next batch, so none starves; the rest of the batch are those nearest to it in
    length, so attention works on equal lengths.

    Args:
        max_tokens: Most tokens in a batch. A longer request runs alone.
        max_seqs: Most requests in a batch.
    """

    def __init__(self, *, max_tokens: int, max_seqs: int) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.waiting_tokens = 0
        self._by_age: deque[Request] = deque()
        self._by_length: list[Request] = []
        self._gone: set[Request] = set()  # ran already, and still in _by_age

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests behind those that wait."""
        new = list(requests)
        self.waiting_tokens += sum(map(len, new))
        self._by_age.extend(new)
        if len(new) == 1:
            insort(self._by_length, new[0], key=len)
        else:
            self._by_length.extend(new)
            self._by_length.sort(key=len)

    def next_batch(self) -> list[Request]:
        """Takes the next requests off the queue, shortest first. Cancelled ones are dropped; may be empty."""
        anchor = self._oldest()
        while anchor is not None and anchor.future.cancelled():
            place = self._place(anchor)
            self._take(place, place + 1)
            anchor = self._oldest()
        return [] if anchor is None else self._take(*self._reach(self._place(anchor)))

    def drop_cancelled(self) -> None:
        """Forgets the cancelled requests now, rather than when their turn comes."""
        cancelled = [request for request in self._by_length if request.future.cancelled()]
        for request in cancelled:
            request.future.set_running_or_notify_cancel()
        self._gone.update(cancelled)
        self._by_length = [request for request in self._by_length if request not in self._gone]
        self.waiting_tokens -= sum(map(len, cancelled))
        self._oldest()

    def drain(self) -> list[Request]:
        """Takes every waiting request off the queue."""
        waiting = self._by_length
        self._by_age.clear()
        self._by_length, self._gone, self.waiting_tokens = [], set(), 0
        return waiting

    def _take(self, low: int, high: int) -> list[Request]:
        """Takes a run of the length-sorted queue; returns those that were not cancelled."""
        taken = self._by_length[low:high]
        del self._by_length[low:high]
        self._gone.update(taken)
        self.waiting_tokens -= sum(map(len, taken))
        self._oldest()  # forget what has run
        return [request for request in taken if request.future.set_running_or_notify_cancel()]

    def _oldest(self) -> Request | None:
        while self._by_age and self._by_age[0] in self._gone:
            self._gone.remove(self._by_age.popleft())
        return self._by_age[0] if self._by_age else None

    def _place(self, request: Request) -> int:
        place = bisect_left(self._by_length, len(request), key=len)
        while self._by_length[place] is not request:
            place += 1
        return place

    def _reach(self, place: int) -> tuple[int, int]:
        """The widest run of the length-sorted queue around `place` that the budget allows, nearest lengths first."""
        queue = self._by_length
        length = len(queue[place])
        low, high, tokens = place, place + 1, length
        while high - low < self.max_seqs:
            below = length - len(queue[low - 1]) if low > 0 else None
            above = len(queue[high]) - length if high < len(queue) else None
            if above is not None and (below is None or above <= below) and tokens + len(queue[high]) <= self.max_tokens:
                tokens += len(queue[high])
                high += 1
            elif below is not None and tokens + len(queue[low - 1]) <= self.max_tokens:
                low -= 1
                tokens += len(queue[low])
            else:
                break
        return low, high

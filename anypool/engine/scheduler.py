"""Which requests run next."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush
from itertools import count

from anypool.engine.request import Request

# How many full batches may pass a request for each step of priority that it stands behind.
PRIORITY_BATCHES = 16
# A queue this many times as long as what is added takes it one by one, which is faster than sorting all of it.
_FEW = 16


class Scheduler:
    """Turns under a token budget: fair between submissions, near lengths together.

    Each request has a tag, and the smallest tag runs next: self-clocked fair queueing (Golestani, 1994). The tags of
    one submission follow each other by its tokens, starting from the tag that ran last. So a submission of a million
    tokens and one of ten share the device, and since the clock only moves on, nothing starves. A priority moves the
    tag by so many batches. The rest of a batch are the requests nearest in length to the one whose turn it is, so
    attention works on equal lengths.

    A request longer than the budget has turns of its own, one chunk at a time where the model can, and one such
    request at a time: the keys of a single prompt are all that is ever kept.

    Args:
        max_tokens: Most tokens in a batch.
        max_seqs: Most requests in a batch.
    """

    def __init__(self, *, max_tokens: int, max_seqs: int) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.waiting_tokens = 0
        self._priority_tokens = PRIORITY_BATCHES * max_tokens
        self._clock = 0
        self._arrivals = count()
        self._by_tag: list[tuple[int, int, Request]] = []  # a heap
        self._by_length: list[Request] = []
        self._long: list[tuple[int, int, Request]] = []  # a heap: longer than a batch
        self._in_chunks: Request | None = None
        self._gone: set[int] = set()  # arrivals of those that left already, and are still in _by_tag
        self._tokens_at: Counter[int] = Counter()  # waiting tokens by their tag, in steps of _step
        self._step = max(1, max_tokens // 4)

    def __len__(self) -> int:
        return len(self._by_length) + len(self._long) + (self._in_chunks is not None)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues one submission."""
        tag, new = self._clock, []
        for request in requests:
            tag += len(request)
            request.tag = tag + request.priority * self._priority_tokens
            request.arrival = next(self._arrivals)
            new.append(request)
        self._enqueue(new)

    def tokens_before(self, tokens: int, priority: int = 0) -> int:
        """How many of the waiting tokens have their turn before the last of a new submission of `tokens`, up to a
        quarter of a batch more.
        """
        last = (self._clock + tokens + priority * self._priority_tokens) // self._step
        return sum(waiting for step, waiting in self._tokens_at.items() if step <= last)

    def _count(self, requests: Collection[Request], sign: int) -> None:
        """Counts requests that came (1) or left (-1). Their tags and lengths change only in between."""
        for request in requests:
            step, tokens = request.tag // self._step, sign * len(request)
            self.waiting_tokens += tokens
            self._tokens_at[step] += tokens
            if not self._tokens_at[step]:
                del self._tokens_at[step]

    def _enqueue(self, new: list[Request]) -> None:
        self._count(new, 1)
        short = [request for request in new if len(request) <= self.max_tokens]
        if len(short) * _FEW < len(self._by_length) + _FEW:
            for request in short:
                heappush(self._by_tag, (request.tag, request.arrival, request))
                insort(self._by_length, request, key=_place_key)
        else:
            self._by_tag += [(request.tag, request.arrival, request) for request in short]
            heapify(self._by_tag)
            self._by_length += short
            self._by_length.sort(key=_place_key)
        for request in new:
            if len(request) > self.max_tokens:
                heappush(self._long, (request.tag, request.arrival, request))

    def next_batch(self, tokens: int | None = None) -> list[Request]:
        """Takes the next requests off the queue, shortest first; empty where none waits.

        Those that are cancelled or past their deadline have their turn like any other.

        Args:
            tokens: Take no more than this, but one request at least; None for as many as a batch may have.
        """
        most = self.max_tokens if tokens is None else min(tokens, self.max_tokens)
        anchor, long = self._anchor(), self._next_long()
        while anchor is not None and len(anchor) > self.max_tokens:  # the budget has shrunk since it came
            self._take(self._place(anchor), self._place(anchor) + 1)
            self._count([anchor], 1)
            heappush(self._long, (anchor.tag, anchor.arrival, anchor))
            anchor, long = self._anchor(), self._next_long()
        if long is not None and (anchor is None or (long.tag, long.arrival) < (anchor.tag, anchor.arrival)):
            self._tick(long)
            return [self._take_long(long)]
        if anchor is None:
            return []
        self._tick(anchor)
        return self._take(*self._reach(self._place(anchor), most))

    def put_back(self, request: Request, tokens: int) -> None:
        """Queues a request again: for its next chunk, after `tokens` of it have run, or to start over where 0 have."""
        request.tag += tokens
        if tokens == 0:
            request.arrival = next(self._arrivals)  # its old entry may still be in _by_tag
            self._enqueue([request])
            return
        assert self._in_chunks is None
        self._count([request], 1)
        self._in_chunks = request

    def take_back(self, request: Request) -> None:
        """Takes a request off the queue if it waits there for its next chunk."""
        if self._in_chunks is request:
            self._take_long(request)

    def take_gone(self) -> list[Request]:
        """Takes the requests off the queue that are cancelled or past their deadline, but for one in chunks."""
        now = time.monotonic()
        short = [request for request in self._by_length if request.is_gone(now)]
        long = [request for _, _, request in self._long if request.is_gone(now)]
        if short:
            left = set(short)
            self._by_length = [request for request in self._by_length if request not in left]
            self._forget(short)
        if long:
            self._long = [entry for entry in self._long if entry[2] not in long]
            heapify(self._long)
            self._count(long, -1)
        return short + long

    def drain(self) -> list[Request]:
        """Takes every waiting request off the queue."""
        waiting = self._waiting()
        self._by_tag, self._by_length, self._long, self._in_chunks = [], [], [], None
        self._gone, self.waiting_tokens = set(), 0
        self._tokens_at.clear()
        return waiting

    def _waiting(self) -> list[Request]:
        in_chunks = [] if self._in_chunks is None else [self._in_chunks]
        return [*in_chunks, *self._by_length, *(request for _, _, request in self._long)]

    def _tick(self, request: Request) -> None:
        self._clock = max(self._clock, request.tag - request.priority * self._priority_tokens)

    def _anchor(self) -> Request | None:
        """The request of the short queue whose turn it is."""
        while self._by_tag and self._by_tag[0][1] in self._gone:
            self._gone.remove(heappop(self._by_tag)[1])
        return self._by_tag[0][2] if self._by_tag else None

    def _next_long(self) -> Request | None:
        if self._in_chunks is not None:
            return self._in_chunks
        return self._long[0][2] if self._long else None

    def _take_long(self, request: Request) -> Request:
        if request is self._in_chunks:
            self._in_chunks = None
        else:
            heappop(self._long)
        self._count([request], -1)
        return request

    def _take(self, low: int, high: int) -> list[Request]:
        """Takes a run of the length-sorted queue."""
        taken = self._by_length[low:high]
        del self._by_length[low:high]
        self._forget(taken)
        return taken

    def _forget(self, left: Collection[Request]) -> None:
        """Notes which short requests have left. The heap lets go of them at its top, or all at once when most have."""
        self._gone.update(request.arrival for request in left)
        self._count(left, -1)
        if len(self._gone) > len(self._by_length) + self.max_seqs:
            self._by_tag = [entry for entry in self._by_tag if entry[1] not in self._gone]
            heapify(self._by_tag)
            self._gone.clear()
        self._anchor()

    def _place(self, request: Request) -> int:
        return bisect_left(self._by_length, _place_key(request), key=_place_key)

    def _reach(self, place: int, most: int) -> tuple[int, int]:
        """The widest run of the length-sorted queue around `place` of up to `most` tokens, nearest lengths first."""
        queue = self._by_length
        length = len(queue[place])
        low, high, tokens = place, place + 1, length
        while high - low < self.max_seqs:
            below = length - len(queue[low - 1]) if low > 0 else None
            above = len(queue[high]) - length if high < len(queue) else None
            if above is not None and (below is None or above <= below) and tokens + len(queue[high]) <= most:
                tokens += len(queue[high])
                high += 1
            elif below is not None and tokens + len(queue[low - 1]) <= most:
                low -= 1
                tokens += len(queue[low])
            else:
                break
        return low, high


def _place_key(request: Request) -> tuple[int, int, int]:
    return len(request), request.tag, request.arrival

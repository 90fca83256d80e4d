"""No request is lost, run twice or starved, whatever comes in whatever order."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anypool.engine import scheduler as module
from anypool.engine.request import Request
from anypool.engine.scheduler import PRIORITY_BATCHES, Scheduler
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask

PLAN = PoolingPlan(task=PoolingTask.EMBED, normalize=True)
MAX_TOKENS, MAX_SEQS = 40, 5


def request(length: int, *, priority: int = 0) -> Request:
    return Request(request_id="r", token_ids=[0] * length, plan=PLAN, priority=priority)


class Queue(RuleBasedStateMachine):
    """Compares the scheduler with a plain list of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
        self.waiting: list[Request] = []
        self.in_chunks: Request | None = None
        self.ended: set[Request] = set()

    @rule(lengths=st.lists(st.integers(1, 100), max_size=8), priority=st.integers(-2, 2))
    def add(self, lengths: list[int], priority: int) -> None:
        new = [request(length, priority=priority) for length in lengths]
        self.scheduler.add(new)
        self.waiting += new

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), expires=st.booleans())
    def nobody_waits(self, data: st.DataObject, expires: bool) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        if expires:
            gone.deadline = time.monotonic()
        else:
            gone.future.cancel()

    @rule(chunk=st.integers(0, MAX_TOKENS), starts_over=st.booleans())
    def next_batch(self, chunk: int, starts_over: bool) -> None:
        before = list(self.waiting)
        batch = self.scheduler.next_batch()
        assert bool(batch) == bool(before)
        assert not self.ended & set(batch), "a request ran twice"
        assert set(batch) <= set(before)
        assert [len(r) for r in batch] == sorted(len(r) for r in batch)
        self.waiting = [r for r in before if r not in batch]
        if not batch:
            return
        long = [r for r in before if len(r) > self.scheduler.max_tokens]
        if batch[0] in long:
            assert len(batch) == 1, "a long request has a turn of its own"
            assert self.in_chunks in (None, batch[0]), "one long request at a time"
            self.in_chunks = None
            if chunk:
                self.scheduler.put_back(batch[0], chunk)
                self.waiting.append(batch[0])
                self.in_chunks = batch[0]
                return
        else:
            assert len(batch) <= MAX_SEQS
            assert sum(map(len, batch)) <= self.scheduler.max_tokens
            first = min((r for r in before if r not in long), key=lambda r: (r.tag, r.arrival))
            assert first in batch, "the request whose turn it was was passed over"
            if starts_over:
                again = batch.pop()
                self.scheduler.put_back(again, 0)
                self.waiting.append(again)
        self.ended |= set(batch)

    @rule()
    def memory_is_short(self) -> None:
        self.scheduler.max_tokens = max(10, self.scheduler.max_tokens // 2)

    @rule()
    def take_gone(self) -> None:
        now = time.monotonic()
        gone = {r for r in self.waiting if r.is_gone(now) and r is not self.in_chunks}
        assert set(self.scheduler.take_gone()) == gone
        self.waiting = [r for r in self.waiting if r not in gone]
        self.ended |= gone

    @rule()
    def drain(self) -> None:
        drained = self.scheduler.drain()
        assert sorted(map(id, drained)) == sorted(map(id, self.waiting))
        self.ended |= set(drained)
        self.waiting, self.in_chunks = [], None

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.scheduler) == len(self.waiting)
        assert self.scheduler.waiting_tokens == sum(map(len, self.waiting))

    @invariant()
    def what_is_before_a_newcomer_is_right(self) -> None:
        for tokens, priority in ((1, 0), (100, 0), (100, -1), (10**9, 0)):
            tag = self.scheduler._clock + tokens + priority * PRIORITY_BATCHES * MAX_TOKENS
            before = self.scheduler.tokens_before(tokens, priority)
            assert sum(len(r) for r in self.waiting if r.tag <= tag) <= before
            assert before <= sum(len(r) for r in self.waiting if r.tag < tag + MAX_TOKENS)


TestQueue = Queue.TestCase


@given(st.lists(st.integers(1, 60), max_size=30))
def test_every_request_runs_exactly_once(lengths: list[int]) -> None:
    scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    requests = [request(length) for length in lengths]
    scheduler.add(requests)
    ran: list[Request] = []
    while batch := scheduler.next_batch():
        ran += batch
    assert sorted(map(id, ran)) == sorted(map(id, requests))
    assert len(scheduler) == scheduler.waiting_tokens == 0
    assert not scheduler._by_tag
    assert not scheduler._gone


def test_a_request_that_starts_over_has_one_more_turn_and_leaves_no_trace() -> None:
    scheduler = Scheduler(max_tokens=11, max_seqs=8)
    first, neighbour, nearest = requests = [request(3), request(5), request(4)]
    scheduler.add(requests)
    assert scheduler.next_batch() == [first, nearest]
    scheduler.put_back(nearest, 0)
    assert scheduler.next_batch() == [nearest, neighbour]
    assert scheduler.next_batch() == []
    assert len(scheduler) == scheduler.waiting_tokens == 0


def test_near_lengths_run_together_around_the_one_whose_turn_it_is() -> None:
    scheduler = Scheduler(max_tokens=30, max_seqs=3)
    scheduler.add([request(n) for n in (10, 2, 9, 30, 11, 3)])
    assert [[len(r) for r in scheduler.next_batch()] for _ in range(4)] == [[9, 10, 11], [2, 3], [30], []]


def test_requests_added_one_by_one_keep_their_turn() -> None:
    scheduler = Scheduler(max_tokens=10, max_seqs=1)
    one_by_one = [request(5) for _ in range(4)]
    for r in one_by_one:
        scheduler.add([r])
    assert [scheduler.next_batch() for _ in range(4)] == [[r] for r in one_by_one]


def test_a_few_requests_are_added_to_a_long_queue_without_going_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    queue.add([request(n % 30 + 1) for n in range(10_000)])
    looked_at = []
    key = module._place_key
    monkeypatch.setattr(module, "_place_key", lambda one: looked_at.append(one) or key(one))
    queue.add([request(7), request(3)])
    assert len(looked_at) < 100
    assert len(queue) == 10_002


def test_a_small_call_does_not_wait_for_a_huge_one() -> None:
    scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    scheduler.add([request(9) for _ in range(1000)])
    for _ in range(10):
        scheduler.next_batch()
    small = request(20)
    scheduler.add([small])
    assert small in [*scheduler.next_batch(), *scheduler.next_batch()]


def test_two_huge_calls_share_the_device() -> None:
    scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    first, second = ([request(length) for _ in range(300)] for length in (8, 30))
    scheduler.add(first)
    scheduler.add(second)
    ran = {id(r): len(r) for _ in range(60) for r in scheduler.next_batch()}
    tokens = [sum(ran.get(id(r), 0) for r in call) for call in (first, second)]
    assert 0.3 < tokens[0] / sum(tokens) < 0.7


def test_a_long_request_takes_turns_with_short_ones_between_its_chunks() -> None:
    scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    long, other = request(200), request(100)
    scheduler.add([long])
    scheduler.add([other])
    assert scheduler.next_batch() == [other], "the shorter one ends first"
    scheduler.put_back(other, 40)
    scheduler.add([short := request(5)])
    turns = []
    for _ in range(3):
        [turn] = scheduler.next_batch()
        turns.append(turn)
        if turn is other:
            scheduler.put_back(other, 40)
    assert short in turns
    assert long not in turns, "one long request at a time"


def test_a_smaller_priority_runs_earlier_and_a_larger_one_is_not_starved() -> None:
    scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=1)
    usual, urgent, patient = request(30), request(30, priority=-1), request(30, priority=1)
    scheduler.add([patient])
    scheduler.add([usual])
    scheduler.add([urgent])
    assert scheduler.next_batch() == [urgent]
    assert scheduler.next_batch() == [usual]
    scheduler.add([request(30)])
    generator = random.Random(0)
    turns = 0
    while scheduler.next_batch() != [patient]:
        scheduler.add([request(generator.randint(20, 40))])
        turns += 1
        assert turns < 2 * PRIORITY_BATCHES, "it starves"
    assert turns > 1

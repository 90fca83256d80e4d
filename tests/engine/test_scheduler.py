"""No request is lost, run twice or starved, whatever comes in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anypool.engine.request import Request
from anypool.engine.scheduler import Scheduler
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask

PLAN = PoolingPlan(task=PoolingTask.EMBED, normalize=True)
MAX_TOKENS, MAX_SEQS = 40, 5


def request(length: int) -> Request:
    return Request(request_id="r", token_ids=[0] * length, plan=PLAN)


class Queue(RuleBasedStateMachine):
    """Compares the scheduler with a plain list in order of age."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
        self.waiting: list[Request] = []
        self.taken: set[Request] = set()

    @rule(lengths=st.lists(st.integers(1, 60), max_size=8))
    def add(self, lengths: list[int]) -> None:
        new = [request(length) for length in lengths]
        self.scheduler.add(new)
        self.waiting += new

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert data.draw(st.sampled_from(self.waiting)).future.cancel()

    @rule()
    def next_batch(self) -> None:
        live = [r for r in self.waiting if not r.future.cancelled()]
        batch = self.scheduler.next_batch()
        assert bool(batch) == bool(live)
        assert not self.taken & set(batch), "a request ran twice"
        assert set(batch) <= set(live), "a cancelled request ran"
        assert all(r.future.running() for r in batch)
        if batch:
            assert live[0] in batch, "the oldest request was passed over"
            assert len(batch) <= MAX_SEQS
            assert sum(map(len, batch)) <= MAX_TOKENS or len(batch) == 1
            assert [len(r) for r in batch] == sorted(len(r) for r in batch)
        self.taken |= set(batch)
        # Cancelled requests may leave with any batch.
        queued = set(self.scheduler._by_length)
        assert all(r in queued for r in live if r not in self.taken), "a request was lost"
        self.waiting = [r for r in self.waiting if r in queued]

    @rule()
    def drop_cancelled(self) -> None:
        self.scheduler.drop_cancelled()
        self.waiting = [r for r in self.waiting if not r.future.cancelled()]
        assert set(self.scheduler._by_length) == set(self.waiting)

    @rule()
    def drain(self) -> None:
        drained = self.scheduler.drain()
        assert sorted(map(id, drained)) == sorted(map(id, self.waiting))
        self.waiting = []

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.scheduler) == len(self.waiting)
        assert self.scheduler.waiting_tokens == sum(map(len, self.waiting))


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
    assert not scheduler._by_age
    assert not scheduler._gone


def test_near_lengths_run_together_around_the_oldest() -> None:
    scheduler = Scheduler(max_tokens=30, max_seqs=3)
    scheduler.add([request(n) for n in (10, 2, 9, 30, 11, 3)])
    assert [[len(r) for r in scheduler.next_batch()] for _ in range(4)] == [[9, 10, 11], [2, 3], [30], []]


def test_requests_added_one_by_one_keep_their_turn() -> None:
    scheduler = Scheduler(max_tokens=10, max_seqs=1)
    one_by_one = [request(5) for _ in range(4)]
    for r in one_by_one:
        scheduler.add([r])
    assert [scheduler.next_batch() for _ in range(4)] == [[r] for r in one_by_one]

"""No block is lost, given twice or found under a hash that is not its own, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anypool.engine.kv_cache import BlockPool, block_hashes

SIZE = 4


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=30),
    st.lists(st.integers(0, 2**31 - 1), max_size=30),
    st.integers(1, 7),
)
def test_hashes_are_equal_exactly_where_all_tokens_up_to_there_are(a: list[int], b: list[int], size: int) -> None:
    hashes_a, hashes_b = block_hashes(a, size, b"x"), block_hashes(a[: len(a) // 2] + b, size, b"x")
    assert len(hashes_a) == len(a) // size
    other = a[: len(a) // 2] + b
    for i, (one, two) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        assert (one == two) == (a[: (i + 1) * size] == other[: (i + 1) * size])


def test_prompts_of_different_salts_share_nothing() -> None:
    one, two = (set(block_hashes(range(12), SIZE, salt)) for salt in (b"", b"lora"))
    assert len(one) == len(two) == 3
    assert not one & two


def test_what_is_cached_is_matched_up_to_the_first_block_that_is_not() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    assert blocks is not None
    hashes = block_hashes(range(12), SIZE, b"")
    for block, block_hash in zip(blocks[::2], hashes[::2], strict=True):  # the one between is not committed
        pool.commit(block, block_hash)
    assert pool.match(hashes) == blocks[:1]
    pool.commit(blocks[1], hashes[1])
    assert pool.match(hashes) == blocks


def test_a_chain_is_evicted_from_its_end_and_the_longest_unused_one_first() -> None:
    pool = BlockPool(5, SIZE)
    old, new = block_hashes(range(12), SIZE, b""), block_hashes(range(50, 58), SIZE, b"")
    held = []
    for hashes in (old, new):
        blocks = pool.allocate(len(hashes))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.commit(block, block_hash)
        held.append(blocks)
    pool.release(held[0])
    pool.release(held[1])
    assert pool.allocate(2) == [held[0][2], held[0][1]]
    pool.release(pool.match(old))  # the first block of the old chain is now the newest
    assert pool.allocate(2) == [held[1][1], held[1][0]]
    assert pool.match(old) == held[0][:1]
    assert pool.allocate(1) is None


def test_allocate_changes_nothing_where_there_are_not_enough() -> None:
    pool = BlockPool(3, SIZE)
    [block] = pool.allocate(1) or []
    pool.commit(block, b"h")
    pool.release([block])
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.match([b"h"]) == [block]


class Pool(RuleBasedStateMachine):
    """Compares the pool with a plain account of references, hashes and times of last use."""

    BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BLOCKS, SIZE)
        self.held: list[list[int]] = []  # one reference per block of each list
        self.hash_of: dict[int, bytes] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def references(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    def unreferenced_cached(self) -> list[int]:
        """The least recently used first."""
        return sorted(set(self.hash_of) - set(self.references()), key=self.last_use.__getitem__)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        referenced, cached = self.references(), self.unreferenced_cached()
        plain = set(range(self.BLOCKS)) - set(referenced) - set(cached)
        blocks = self.pool.allocate(count)
        if count > len(plain) + len(cached):
            assert blocks is None
            return
        assert blocks is not None
        evicted = cached[: max(0, count - len(plain))]
        assert len(set(blocks)) == count
        assert set(blocks) - plain == set(evicted), "another block was evicted than the least recently used"
        for block in evicted:
            del self.hash_of[block]
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 9))
    def commit(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.references())))
        block_hash = self.hash_of.get(block, b"%d" % number)
        self.pool.commit(block, block_hash)
        if block_hash not in self.hash_of.values():
            self.hash_of[block] = block_hash

    @rule(numbers=st.lists(st.integers(0, 9), unique=True, max_size=5))
    def match(self, numbers: list[int]) -> None:
        block_of = {block_hash: block for block, block_hash in self.hash_of.items()}
        expected = []
        for number in numbers:
            if b"%d" % number not in block_of:
                break
            expected.append(block_of[b"%d" % number])
        assert self.pool.match([b"%d" % number for number in numbers]) == expected
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.held)))
        self.pool.acquire(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.clock += 1
            if self.references()[block] == 0:
                self.last_use[block] = self.clock

    @invariant()
    def every_block_is_free_or_evictable_or_referenced(self) -> None:
        referenced = set(self.references())
        free, evictable = self.pool._free, list(self.pool._evictable)
        assert sorted([*free, *evictable, *referenced]) == list(range(self.BLOCKS))
        assert evictable == self.unreferenced_cached()
        assert self.pool.num_free == self.BLOCKS - len(referenced)
        assert self.pool.num_cached == len(self.hash_of)
        assert [self.references()[block] for block in range(self.BLOCKS)] == self.pool._references


TestPool = Pool.TestCase

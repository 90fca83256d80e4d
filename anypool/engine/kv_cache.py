"""Which blocks of a `KVStore` are free, referenced or cached, and what tokens the cached ones hold."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """A hash per full block, of its tokens and all before them.

    Args:
        token_ids: The tokens of a prompt.
        block_size: Tokens per block. The last tokens of a prompt, which fill none, have no hash.
        salt: What else the keys of a token depend on; prompts of different salts share nothing.
    """
    tokens = memoryview(array("i", token_ids))
    parent, hashes = hashlib.sha256(salt).digest(), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + tokens[start : start + block_size]).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """The blocks of a store. A block is

    - free: its content means nothing;
    - referenced: requests that run write or read it, as many as it has references;
    - evictable: nobody references it, but it has a hash, under which `match` finds it until it is needed elsewhere.

    A referenced block may have a hash as well. All methods are O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that `match` can find, referenced or not."""
        return len(self._blocks)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of cached blocks from the first hash on; each gets a reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        self.acquire(found)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Blocks with one reference each, for new content; None, and no change, where there are not that many.

        Free ones are taken first, then evictable ones, the least recently used first.
        """
        if count > self.num_free:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def commit(self, block: int, block_hash: bytes) -> None:
        """Makes a referenced block, whose content is complete, findable; another one of the same hash stays it."""
        assert self._references[block] > 0, f"block {block} is committed, and nobody holds it"
        assert self._hashes[block] in (None, block_hash), f"block {block} is committed under two hashes"
        if self._blocks.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each, which must be referenced or cached."""
        for block in blocks:
            assert self._references[block] > 0 or block in self._evictable, f"block {block} is free"
            self._references[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each.

        Those without any are evictable if they have a hash, as the most recently used ones, and free otherwise. Of the
        blocks of a chain, the last is evicted first: those after it could not be found without it.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released more often than acquired"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._blocks[block_hash]
        self._hashes[block] = None
        return block

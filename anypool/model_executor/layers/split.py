"""Which part of a layer this process holds, where several hold one model together.

A product is split by its output ("column", after the columns of W^T) or by its input ("row"). A column-parallel product
followed by a row-parallel one needs a single sum over the processes, after the second (Shoeybi et al.,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from anypool.model_executor.distributed import ranks

Split = Literal["column", "row"]

# Parts of a dimension of a checkpoint's tensor, in the order in which they lie in memory here.
Share = tuple[range, ...]


def all_of(size: int) -> Share:
    """The whole of a dimension."""
    return (range(size),)


def even_share(size: int, *, blocks: int = 1) -> Share:
    """An equal part of each of so many equal blocks, of which a dimension is a stack."""
    here, block = ranks(), size // blocks
    part = block // here.tp_size
    assert part * here.tp_size * blocks == size, "the degree was checked when the model was chosen"
    starts = (i * block + here.tp_rank * part for i in range(blocks))
    return tuple(range(start, start + part) for start in starts)


def vocabulary_share(rows: int) -> range:
    """As many rows as the other processes have, the last of which may have fewer or none."""
    here = ranks()
    part = -(-rows // here.tp_size)
    return range(min(rows, here.tp_rank * part), min(rows, (here.tp_rank + 1) * part))


@dataclass(frozen=True)
class LocalHeads:
    """The heads of attention that this process computes.

    Attributes:
        queries: Heads of queries, neighbours.
        keys: The head of keys and values of each group of them. Groups are equal: where a checkpoint's are cut by the
            boundary between processes, a head of keys stands here more than once, or on several processes.
    """

    queries: range
    keys: tuple[int, ...]

    @classmethod
    def share(cls, heads: int, kv_heads: int) -> LocalHeads:
        """This process's share of `heads` heads of queries over `kv_heads` of keys, which divide them."""
        [queries] = even_share(heads)
        queries_per_key = heads // kv_heads
        group = math.gcd(queries_per_key, len(queries))
        return cls(queries, tuple(first // queries_per_key for first in queries[::group]))

    def query_rows(self, head_size: int) -> Share:
        """Rows of the projection to queries."""
        return (range(self.queries.start * head_size, self.queries.stop * head_size),)

    def key_rows(self, head_size: int) -> Share:
        """Rows of the projections to keys and to values."""
        return tuple(range(head * head_size, (head + 1) * head_size) for head in self.keys)


def local_kv_heads(heads: int, kv_heads: int) -> int:
    """Heads of keys per layer that this process holds; `kv_heads` is 0 where there are as many as of queries."""
    return len(LocalHeads.share(heads, kv_heads or heads).keys) if heads else 0

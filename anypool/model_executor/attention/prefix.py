"""Keys that precede the queries of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence

from anypool.errors import EngineError
from anypool.model_executor.kv_store import KVStore


@dataclass(frozen=True, eq=False)
class PrefixKeys:
    """Which cached keys each sequence of a batch attends to before its own, and where the batch's own keys go.

    Every call of attention first stores the batch's own keys, then reads. So a sequence may have a prefix that another
    sequence of the same batch computes, and its own earlier chunk may be in the same batch.

    Attributes:
        store: Where the keys are.
        lengths: Tokens before the queries, per sequence; 0 where there are none.
        block_tables: Per sequence `[B]` int64 on the device: the blocks of its tokens 0, 1, ...; at least those of
            its prefix.
        rows_S: `[S]` int64 rows of the batch whose keys are stored.
        slots_S: `[S]` int64 where in the store they go.
    """

    store: KVStore
    lengths: tuple[int, ...]
    block_tables: tuple[torch.Tensor, ...]
    rows_S: torch.Tensor
    slots_S: torch.Tensor
    _calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    @classmethod
    def plan(
        cls,
        store: KVStore,
        *,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        stored: Sequence[int],
    ) -> PrefixKeys:
        """Makes the index tensors of a batch.

        Args:
            store: Where the keys are.
            starts: Tokens before the queries, per sequence.
            lengths: Tokens of the batch, per sequence.
            block_tables: Blocks of tokens 0, 1, ... of each prompt, as far as they have any.
            stored: Per sequence how many of its first tokens are in the store after this batch; at most start +
                length. Tokens from `stored` on are computed and not kept, none is kept where it is not above start.
        """
        size = store.block_size
        rows: list[int] = []
        slots: list[int] = []
        first = 0
        for start, length, table, end in zip(starts, lengths, block_tables, stored, strict=True):
            assert end <= start + length, "a token that is not in the batch cannot be stored"
            assert max(start, end) <= len(table) * size, "the blocks of a prompt do not reach as far as its tokens"
            rows.extend(range(first, first + end - start))
            slots.extend(table[position // size] * size + position % size for position in range(start, end))
            first += length
        blocks_B = torch.tensor([block for table in block_tables for block in table], dtype=torch.int64)
        return cls(
            store=store,
            lengths=tuple(starts),
            block_tables=blocks_B.to(store.device).split([len(table) for table in block_tables]),
            rows_S=torch.tensor(rows, dtype=torch.int64, device=store.device),
            slots_S=torch.tensor(slots, dtype=torch.int64, device=store.device),
        )

    @cached_property
    def lengths_N(self) -> torch.Tensor:
        """`[N]` int32 `lengths`."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.store.device)

    @cached_property
    def tables_NB(self) -> torch.Tensor:
        """`[N, blocks]` int32 `block_tables`, filled up to the longest."""
        return pad_sequence(list(self.block_tables), batch_first=True).to(torch.int32)

    def over(self, store: KVStore) -> PrefixKeys:
        """The same blocks of another process's store, of the same size."""
        return replace(
            self,
            store=store,
            block_tables=tuple(table.to(store.device) for table in self.block_tables),
            rows_S=self.rows_S.to(store.device),
            slots_S=self.slots_S.to(store.device),
        )

    def extended(self, count: int) -> PrefixKeys:
        """With so many sequences behind these that have no prefix and are not stored."""
        no_blocks = torch.empty(0, dtype=torch.int64, device=self.store.device)
        return replace(
            self,
            lengths=(*self.lengths, *(0,) * count),
            block_tables=(*self.block_tables, *(no_blocks,) * count),
        )

    def begin(self) -> None:
        """A forward pass over the batch begins: the next call of attention is layer 0."""
        self._calls[0] = 0

    def store_own(self, k_TGK: torch.Tensor, v_TGV: torch.Tensor) -> int:
        """Stores the batch's own keys and values in the next layer, and returns which that is."""
        layer = self._calls[0]
        self._calls[0] += 1
        self.store.write(layer, self.slots_S, k_TGK.index_select(0, self.rows_S), v_TGV.index_select(0, self.rows_S))
        return layer

    def end(self) -> None:
        """The forward pass is over.

        Raises:
            EngineError: It did not attend through this object, or not as often as passes before it.
        """
        calls, store = self._calls[0], self.store
        if calls == 0 or calls != store.num_layers:
            raise EngineError(
                f"a forward pass over cached keys called attention {calls} times"
                + (f", and one before it {store.num_layers} times" if store.is_complete else "")
                + ": a class with takes_prefix = True mixes tokens through anypool's Attention only"
            )
        store.complete()

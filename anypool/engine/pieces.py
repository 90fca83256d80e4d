"""What a forward pass computes of each prompt, and which blocks of the key-value cache it reads and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from anypool.engine.kv_cache import BlockPool, block_hashes
from anypool.engine.request import Request
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.model_config import ModelConfig
from anypool.pooling.pooler import ChunkedPooling


@dataclass(eq=False)
class Piece:
    """The tokens `start:stop` of one prompt, all of it unless it runs in chunks or begins with a cached prefix.

    Attributes:
        request: Whose prompt.
        start: Tokens before the piece, whose keys are in the cache.
        stop: The end of the piece.
        stored: How many of the prompt's first tokens are in the cache after the pass.
        blocks: The blocks of the prompt's first tokens, each with a reference that the piece holds.
        new_blocks: Those of them that this pass fills, by the hash under which others may find them.
    """

    request: Request
    stop: int
    start: int = 0
    stored: int = 0
    blocks: list[int] = field(default_factory=list)
    new_blocks: dict[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.stop == len(self.request)


class LongPrompt:
    """A prompt that runs in chunks.

    Attributes:
        request: Whose prompt.
        whole: What is left of it after its cached prefix, with the blocks of all of it.
        done: Tokens that are computed, or were cached.
        pooling: What the chunks so far were folded into, for each task; None before the first.
    """

    def __init__(self, whole: Piece, *, stored_in_the_end: int) -> None:
        self.request = whole.request
        self.whole = whole
        self.done = whole.start
        self.pooling: list[ChunkedPooling] | None = None
        self._stored_in_the_end = stored_in_the_end

    def next_piece(self, max_tokens: int) -> Piece:
        """The next chunk. All of it is stored for the chunks that follow."""
        stop = min(self.done + max_tokens, len(self.request))
        stored = stop if stop < len(self.request) else max(self.done, self._stored_in_the_end)
        return Piece(self.request, stop, self.done, stored, self.whole.blocks)


class KVCache:
    """The key-value cache of one engine: blocks in the store, and who may read them.

    Args:
        config: The model's sizes.
        device: Where its keys are.
        block_size: Tokens per block.
        num_blocks: How many blocks there are.
        shares_prefixes: Whether blocks are kept for other prompts that begin alike.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        block_size: int,
        num_blocks: int,
        shares_prefixes: bool,
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.shares_prefixes = shares_prefixes
        self.store = KVStore(num_blocks, block_size, device)
        self.pool = BlockPool(num_blocks, block_size)

    def whole(self, requests: Sequence[Request]) -> list[Piece]:
        """Pieces that finish prompts in one pass. Prompts of one pass share what they have in common as well."""
        pieces = [Piece(request, len(request)) for request in requests]
        if not self.shares_prefixes:
            return pieces
        coming: dict[bytes, int] = {}
        with self._all_or_nothing(pieces):
            for piece in pieces:
                self._plan(piece, coming)
        return pieces

    def begin(self, request: Request) -> LongPrompt:
        """Starts a prompt that runs in chunks, with blocks for all of it."""
        whole = Piece(request, len(request))
        with self._all_or_nothing([whole]):
            hashes = self._hashes(request) if self.shares_prefixes else []
            whole.blocks = self.pool.match(hashes[: self._most_cached(request)])
            cached = len(whole.blocks)
            whole.start = cached * self.block_size
            fresh = self.pool.allocate(-(-len(request) // self.block_size) - cached)
            assert fresh is not None, "there is room for one prompt of any length, and one is held at a time"
            whole.blocks += fresh
            whole.new_blocks = dict(zip(hashes[cached:], fresh))  # noqa: B905 - the last block may not be full
        return LongPrompt(whole, stored_in_the_end=len(hashes) * self.block_size)

    def give_back(self, piece: Piece, *, keep: bool) -> None:
        """Releases the blocks of a piece.

        Args:
            piece: One that has run, or never will.
            keep: Whether others may find what it has computed.
        """
        if keep:
            for block_hash, block in piece.new_blocks.items():
                self.pool.commit(block, block_hash)
        self.pool.release(piece.blocks)
        piece.blocks, piece.new_blocks = [], {}

    @contextmanager
    def _all_or_nothing(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Gives the blocks of pieces back where planning them fails."""
        try:
            yield
        except BaseException:
            for piece in pieces:
                self.give_back(piece, keep=False)
            raise

    def _plan(self, piece: Piece, coming: dict[bytes, int]) -> None:
        hashes = self._hashes(piece.request)
        most = self._most_cached(piece.request)
        piece.blocks = blocks = self.pool.match(hashes[:most])
        while len(blocks) < most and (block := coming.get(hashes[len(blocks)])) is not None:
            self.pool.acquire([block])  # another prompt of this pass computes it
            blocks.append(block)
        piece.start = len(blocks) * self.block_size
        missing = hashes[len(blocks) :]
        fresh = self.pool.allocate(min(len(missing), self.pool.num_free)) or []
        blocks += fresh
        piece.stored = len(blocks) * self.block_size
        piece.new_blocks = dict(zip(missing, fresh))  # noqa: B905 - a full cache keeps fewer
        coming.update(piece.new_blocks)

    def _most_cached(self, request: Request) -> int:
        """Blocks that may be read rather than computed: at least one token of a prompt is computed."""
        return 0 if request.num_keys is not None else (len(request) - 1) // self.block_size

    def _hashes(self, request: Request) -> list[bytes]:
        if request.num_keys is not None:
            return []  # the same ids mean other states where all of them are attended to
        lengths = self.config.frequency_lengths(len(request))
        adapter = None if request.lora is None else request.lora.number
        salt = repr((request.cache_salt, adapter, lengths, request.token_type_ids)).encode()
        return block_hashes(request.token_ids, self.block_size, salt)


def num_blocks(config: ModelConfig, *, dtype: torch.dtype, block_size: int, max_model_len: int, memory: float) -> int:
    """How many blocks fit into `memory` bytes, and at least those of one prompt of any length."""
    layers = 2 * config.num_layers * (config.num_kv_heads or config.num_heads) * (config.head_size or 1)
    per_block = (layers + config.hidden_size) * dtype.itemsize * block_size
    return max(int(memory // per_block), -(-max_model_len // block_size))


def device_memory(device: torch.device) -> int:
    """Bytes of memory that a device has, for a CPU what this process may use of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # not in a container, or "max"
            continue
    return total

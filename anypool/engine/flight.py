"""A batch from its launch until its results are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anypool.engine.batch import make_batch
from anypool.engine.executor import InFlight
from anypool.engine.pieces import KVCache, LongPrompt, Piece
from anypool.engine.request import Request
from anypool.model_executor.rank import Chunk, Work


@dataclass(eq=False)
class Flight:
    """A batch on its way.

    Attributes:
        requests: Whose prompts, or whose chunk.
        budget: Most tokens that a batch might have when it was launched.
        began: When that was, on `time.monotonic`'s clock.
        leaves_others: Whether requests were left waiting.
        in_chunks: Whether it is a chunk of a long prompt.
        pieces: What is computed of each prompt; empty where planning it failed.
        long: The prompt whose chunk it is; None for whole prompts, and where beginning it failed.
        in_flight: What the executor made of it.
    """

    requests: Sequence[Request]
    budget: int
    began: float
    leaves_others: bool
    in_chunks: bool
    pieces: list[Piece] = field(default_factory=list)
    long: LongPrompt | None = None
    in_flight: InFlight | None = None

    @property
    def is_done(self) -> bool:
        """Whether its results are there."""
        return self.in_flight is not None and self.in_flight.is_done

    @property
    def tokens(self) -> int:
        """How many were tried at once."""
        return self.budget if self.in_chunks else sum(map(len, self.requests))

    def plan(self, cache: KVCache | None, *, pad_token_id: int | None, adapters: Sequence[int] = ()) -> Work:
        """Decides what is computed of each prompt, and packs it with the slots of their LoRA adapters."""
        if self.long is not None:
            self.pieces = [self.long.next_piece(self.budget)]
        elif cache is not None:
            self.pieces = cache.whole(self.requests)
        else:
            self.pieces = [Piece(request, len(request)) for request in self.requests]
        batch = make_batch(self.pieces, torch.device("cpu"), pad_token_id=pad_token_id, cache=cache, adapters=adapters)
        if self.long is None:
            further = [[one.plan for one in request.also] for request in self.requests]
            return Work(batch, [request.plan for request in self.requests], further)
        [request], [piece] = self.requests, self.pieces
        chunk = Chunk(is_first=not self.long.has_begun, is_last=piece.is_last)
        return Work(batch, [one.plan for one in (request, *request.also)], chunk=chunk)

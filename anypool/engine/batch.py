"""Pieces of prompts -> the packed batch that the model runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from anypool.engine.pieces import KVCache, Piece
from anypool.model_executor.attention import PrefixKeys
from anypool.model_executor.packed_batch import PackedBatch
from anypool.pooling.methods import Segments


def make_batch(
    pieces: Sequence[Piece],
    device: torch.device,
    *,
    pad_token_id: int | None = None,
    cache: KVCache | None = None,
    adapters: Sequence[int] = (),
) -> PackedBatch:
    """Packs pieces in the order given; shorter ones first makes equal lengths neighbours, which attention likes.

    Args:
        pieces: At least one token of each prompt.
        device: Where the model runs.
        pad_token_id: The id that sequence classification passes over at the end of a text.
        cache: Where the keys before the pieces are, and where theirs go.
        adapters: The slot of each request's LoRA adapter; empty where none has one.
    """
    requests = [piece.request for piece in pieces]
    uses_cache = any(piece.start or piece.stored for piece in pieces)
    prefix = _prefix_keys(pieces, cache) if cache is not None and uses_cache else None
    batch = PackedBatch.pack(
        [piece.request.token_ids[piece.start : piece.stop] for piece in pieces],
        device=device,
        skips=[request.skip for request in requests],
        token_types=[_types(piece) for piece in pieces],
        pad_token_id=pad_token_id,
        starts=[piece.start for piece in pieces],
        prompt_lengths=[len(request) for request in requests],
        prefix=prefix,
        images=[request.images for request in requests],
        key_lengths=_key_lengths(pieces),
        adapters=adapters,
    )
    if prefix is None or cache is None or not cache.shares_prefixes:
        return batch
    prompts = Segments(
        tuple(len(request) for request in requests),
        tuple(request.skip for request in requests),
        device,
        torch.tensor([i for request in requests for i in request.token_ids], dtype=torch.int64, device=device),
        pad_token_id,
    )
    return dataclasses.replace(batch, segments=prompts, keeps_hidden=True)


def _key_lengths(pieces: Sequence[Piece]) -> list[int] | None:
    if all(piece.request.num_keys is None for piece in pieces):
        return None
    return [len(piece) if piece.request.num_keys is None else piece.request.num_keys for piece in pieces]


def _types(piece: Piece) -> list[int] | None:
    types = piece.request.token_type_ids
    return None if types is None else types[piece.start : piece.stop]


def _prefix_keys(pieces: Sequence[Piece], cache: KVCache) -> PrefixKeys:
    return PrefixKeys.plan(
        cache.store,
        starts=[piece.start for piece in pieces],
        lengths=[len(piece) for piece in pieces],
        block_tables=[piece.blocks for piece in pieces],
        stored=[piece.stored for piece in pieces],
    )

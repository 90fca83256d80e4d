"""Requests -> the packed batch that the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anypool.engine.request import Request
from anypool.model_executor.packed_batch import PackedBatch


def make_batch(requests: Sequence[Request], device: torch.device, *, pad_token_id: int | None = None) -> PackedBatch:
    """Packs requests in the order given; shorter ones first makes equal lengths neighbours, which attention likes."""
    return PackedBatch.pack(
        [request.token_ids for request in requests],
        device=device,
        skips=[request.skip for request in requests],
        token_types=[request.token_type_ids for request in requests],
        pad_token_id=pad_token_id,
    )

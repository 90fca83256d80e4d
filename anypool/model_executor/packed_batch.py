"""The packed batch: every token of every sequence in one row, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anypool.model_executor.attention import AttentionMetadata
from anypool.pooling.methods import Segments


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass's input, complete when constructed.

    Attributes:
        input_ids_T: `[T]` int64 token ids.
        positions_T: `[T]` int64, each sequence counted from 0.
        attn: The sequences, for attention.
        segments: The sequences, for pooling.
        token_type_ids_T: `[T]` int64 segment ids of text pairs, or None where all are 0.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attn: AttentionMetadata
    segments: Segments
    token_type_ids_T: torch.Tensor | None = None

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        device: torch.device,
        skips: Sequence[int] | None = None,
        token_types: Sequence[Sequence[int] | None] | None = None,
        pad_token_id: int | None = None,
    ) -> PackedBatch:
        """Packs token ids.

        Args:
            sequences: Token ids per sequence, each at least one.
            device: Where the model runs.
            skips: Leading tokens of each sequence that are not pooled.
            token_types: Segment ids per sequence; None for a sequence of zeros.
            pad_token_id: The id that sequence classification passes over at the end of a text.
        """
        assert sequences and all(sequences), "a batch holds at least one sequence, each with at least one token"
        lengths = tuple(len(ids) for ids in sequences)
        input_ids_T = torch.tensor([i for ids in sequences for i in ids], dtype=torch.int64, device=device)
        skipped = tuple(skips) if skips is not None else (0,) * len(lengths)
        segments = Segments(lengths, skipped, device, input_ids_T, pad_token_id)
        types_T = None
        if token_types is not None and any(types is not None for types in token_types):
            types_T = torch.tensor(
                [t for types, n in zip(token_types, lengths, strict=True) for t in (types or (0,) * n)], device=device
            )
        return cls(
            input_ids_T=input_ids_T,
            positions_T=segments.positions_T,
            attn=AttentionMetadata.from_lengths(lengths, device),
            segments=segments,
            token_type_ids_T=types_T,
        )

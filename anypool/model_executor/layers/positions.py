"""Rows of position tables that do not begin at 0."""

from __future__ import annotations

import torch

from anypool.model_executor.attention import AttentionMetadata


def positions_after_padding(
    input_ids_T: torch.Tensor | None, positions_T: torch.Tensor, attn: AttentionMetadata, *, padding_id: int
) -> torch.Tensor:
    """RoBERTa's positions: they count from the padding id + 1, and padding tokens inside a text do not count.

    Args:
        input_ids_T: `[T]` token ids; None where embeddings stand in their place, of which none is padding.
        positions_T: `[T]` positions, counted from 0 per sequence.
        attn: The sequences.
        padding_id: The padding token, and the row that it has.

    Returns:
        `[T]` rows of the position table.
    """
    if input_ids_T is None:
        return positions_T + padding_id + 1
    counts_T = input_ids_T != padding_id
    if input_ids_T.device.type == "cpu" and bool(counts_T.all()):
        return positions_T + padding_id + 1
    # Counted over the whole batch, less what was counted before the sequence: a GPU need not wait for the host.
    running_T = counts_T.cumsum(0)
    starts_T = torch.arange(len(positions_T), device=positions_T.device) - positions_T
    before_T = (running_T - counts_T.long()).index_select(0, starts_T.clamp_(min=0))
    return (running_T - before_T) * counts_T + padding_id

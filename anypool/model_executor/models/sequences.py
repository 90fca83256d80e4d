"""Some sequences of a packed batch as a batch of their own: what models do that run texts and images apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anypool.model_executor.attention import AttentionMetadata


def some_sequences(
    input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata, sequences: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Ids, positions and lengths of some sequences, by their number."""
    if len(sequences) == len(attn.lengths):
        return input_ids_T, positions_T, attn
    is_chosen_N = torch.zeros(len(attn.lengths), dtype=torch.bool)
    is_chosen_N[list(sequences)] = True
    rows_T = is_chosen_N.repeat_interleave(torch.tensor(attn.lengths)).nonzero().squeeze(1).to(input_ids_T.device)
    group = AttentionMetadata.from_lengths(tuple(attn.lengths[i] for i in sequences), input_ids_T.device)
    return input_ids_T[rows_T], positions_T[rows_T], group

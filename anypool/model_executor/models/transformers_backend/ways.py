"""How a packed batch is given to a module of transformers: as it is, or as batches of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch.nn.utils.rnn import pad_sequence


class Way(str, Enum):
    """How texts share a run of the module.

    `packed` puts all texts into one row, `padded` texts of near lengths into a batch with a mask, `equal_lengths`
    texts of one length into a batch, and `alone` each into its own.
    """

    PACKED = "packed"
    PADDED = "padded"
    EQUAL_LENGTHS = "equal_lengths"
    ALONE = "alone"

    @property
    def label(self) -> str:
        """In words."""
        return _LABELS[self]


_LABELS = {
    Way.PACKED: "packed batches",
    Way.PADDED: "padded batches",
    Way.EQUAL_LENGTHS: "batches of texts of equal length",
    Way.ALONE: "one text at a time",
}
# Of a padded batch at most this part of a row is padding, or so many tokens.
_PADDED_PART, _PADDED_TOKENS = 1 / 4, 8


def groups(lengths: Sequence[int], way: Way) -> Iterator[list[int]]:
    """Texts that share a run, by their number; shortest first."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and not _fits(lengths[group[0]], lengths[i], way):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _fits(shortest: int, longest: int, way: Way) -> bool:
    if way is Way.PADDED:
        return longest - shortest <= max(_PADDED_TOKENS, longest * _PADDED_PART)
    return way is Way.EQUAL_LENGTHS and shortest == longest


def pad(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    """`[N, L, ...]` of N tensors `[length, ...]`, padded on the right."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def mask_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """`[N, L]` int64: 1 for a token, 0 for padding."""
    places_L = torch.arange(max(lengths), device=device)
    return (places_L < torch.tensor(lengths, device=device).unsqueeze(1)).long()

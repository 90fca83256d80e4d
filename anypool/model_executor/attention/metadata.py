"""Where the sequences of a packed batch lie."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from anypool.model_executor.attention.padded import PaddedGroup, padded_groups
from anypool.model_executor.attention.prefix import PrefixKeys


class Run(NamedTuple):
    """Neighbouring sequences of equal length, with equally many keys before their queries.

    Attributes:
        row: The first row of the batch.
        first: The first sequence.
        sequences: How many there are.
        length: Tokens of each.
        before: Keys before the queries of each.
        keys: How many of its own tokens, the leading ones, each attends to.
    """

    row: int
    first: int
    sequences: int
    length: int
    before: int
    keys: int


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a packed batch, as every attention backend sees them.

    Attributes:
        lengths: Tokens per sequence, on the host.
        cu_seqlens: `[N+1]` int32 on the device: sequence i is rows `cu_seqlens[i]:cu_seqlens[i+1]`.
        prompt_lengths: Tokens of the whole prompt that each sequence is a part of; `lengths` where it is all of it.
        prefix: Cached keys before the queries; None for a batch of whole prompts of which nothing is kept.
        key_lengths: Leading tokens per sequence that are attended to, each at least 1. The others attend to these and
            not to each other, as the mask tokens do that expand a query in ColBERT. None where all are.
        key_lengths_N: `[N]` int32 the same on the device.
        is_static: Whether `cu_seqlens` changes under a CUDA graph. Then there are no `lengths`, since who computed with
            those of one batch would be wrong about the next; `prompt_lengths` says how long a sequence may be.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    prompt_lengths: tuple[int, ...]
    prefix: PrefixKeys | None = None
    key_lengths: tuple[int, ...] | None = None
    key_lengths_N: torch.Tensor | None = None
    is_static: bool = False

    @classmethod
    def from_lengths(
        cls,
        lengths: tuple[int, ...],
        device: torch.device,
        *,
        prompt_lengths: tuple[int, ...] | None = None,
        prefix: PrefixKeys | None = None,
        key_lengths: tuple[int, ...] | None = None,
    ) -> AttentionMetadata:
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=cu_seqlens[1:])
        keys_N = None if key_lengths is None else torch.tensor(key_lengths, dtype=torch.int32, device=device)
        prompts = lengths if prompt_lengths is None else prompt_lengths
        return cls(lengths, cu_seqlens.to(device), prompts, prefix, key_lengths, keys_N)

    def extended(self, count: int) -> AttentionMetadata:
        """With so many sequences of one token behind these, which see nothing but themselves and are not stored."""
        ones, device = (1,) * count, self.cu_seqlens.device
        return AttentionMetadata.from_lengths(
            (*self.lengths, *ones),
            device,
            prompt_lengths=(*self.prompt_lengths, *ones),
            prefix=None if self.prefix is None else self.prefix.extended(count),
            key_lengths=None if self.key_lengths is None else (*self.key_lengths, *ones),
        )

    @cached_property
    def max_length(self) -> int:
        return max(self.prompt_lengths if self.is_static else self.lengths)

    @cached_property
    def plans(self) -> dict[Hashable, Any]:
        """What layers have worked out about this batch, for other layers that are alike in what the key says."""
        return {}

    def padded_groups(self, window: tuple[int, int]) -> tuple[PaddedGroup, ...]:
        """The groups of near lengths, for the layers of a window; made by the first of them."""
        key = ("padded", window)
        if key not in self.plans:
            self.plans[key] = tuple(padded_groups(self.lengths, self.key_counts, window))
        groups: tuple[PaddedGroup, ...] = self.plans[key]
        return groups

    @property
    def key_counts(self) -> tuple[int, ...]:
        """Tokens per sequence that are attended to."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All sequences in order, as few runs as there can be."""
        found: list[Run] = []
        row = 0
        for i, (length, keys) in enumerate(zip(self.lengths, self.key_counts, strict=True)):
            before = 0 if self.prefix is None else self.prefix.lengths[i]
            if found and found[-1][3:] == (length, before, keys):
                found[-1] = found[-1]._replace(sequences=found[-1].sequences + 1)
            else:
                found.append(Run(row, i, 1, length, before, keys))
            row += length
        return tuple(found)

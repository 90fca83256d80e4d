"""How long the documents are: all alike, or as a sample has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anypool.model_executor.outline import Outline


@dataclass(frozen=True)
class Lengths:
    """The lengths of documents, in tokens that are run.

    Attributes:
        tokens: Of each document of the sample, or of the one that stands for all.
        is_sample: Whether they were counted.
    """

    tokens: tuple[int, ...]
    is_sample: bool

    @classmethod
    def alike(cls, tokens: int) -> Lengths:
        return cls((tokens,), is_sample=False)

    @classmethod
    def counted(cls, tokens: Sequence[int], limit: int) -> Lengths:
        """Of documents that are cut at a limit."""
        return cls(tuple(min(one, limit) for one in tokens), is_sample=True)

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def flop(self, outline: Outline) -> float:
        """Operations of a document, on average. Attention's grow with the square, so it is a mean over documents."""
        return sum(map(outline.flop, self.tokens)) / len(self.tokens)

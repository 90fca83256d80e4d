"""The texts of a benchmark: random words, the same in every run."""

from __future__ import annotations

import random

from anypool.errors import InvalidParameterError

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)
# Fewest and most words of a text; of a long one, tokens.
SETS = {"short": (8, 24), "mixed": (10, 220), "long": (1000, 2000)}
# A long text stands for this many others.
LONG_COUNT = 16


def parse_sets(given: str) -> tuple[str, ...]:
    """The names in a list with commas, in the order given.

    Raises:
        InvalidParameterError: A name is unknown, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    unknown = [name for name in names if name not in SETS]
    if unknown or not names:
        raise InvalidParameterError(f"--sets {given!r}: known sets are {', '.join(SETS)}")
    return names


def make_texts(name: str, count: int, *, tokens_per_word: float) -> list[str]:
    """The texts of a set.

    Args:
        name: Of the set.
        count: How many; there are fewer long ones.
        tokens_per_word: What long texts are measured by.
    """
    low, high = SETS[name]
    if name == "long":
        count, low, high = max(1, count // LONG_COUNT), int(low / tokens_per_word), int(high / tokens_per_word)
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=chance.randint(low, high))) for _ in range(count)]


def describe(name: str) -> str:
    """What a set's texts are."""
    low, high = SETS[name]
    return f"{low:,} to {high:,} {'tokens' if name == 'long' else 'words'}"

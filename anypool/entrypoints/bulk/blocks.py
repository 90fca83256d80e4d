"""Rows on their way through a bulk job: blocks of texts as they were read, and what the model made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from anypool.errors import AnypoolError

# What is tokenised and queued at a time: enough to put near lengths together, little enough for any memory.
BLOCK_ROWS = 2048
_BLOCK_CHARACTERS = 1 << 18

# A column of a block: values, or a pyarrow array, which keeps its type. Both have a length and slices.
Column = Any


class Position(NamedTuple):
    """How far a job has read: `place` rows or lines of the input number `file`, `rows` rows in all."""

    file: int = 0
    place: int = 0
    rows: int = 0


class Row(NamedTuple):
    """A row of a text file: where it is, its text or why it has none, and the values that are kept beside."""

    place: int
    text: str | AnypoolError
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of one file, one after the other.

    Attributes:
        places: Their numbers in the file, from 1: of lines where it is made of lines, of rows otherwise.
        texts: Their texts; an error where a row has none.
        kept: Further columns by name.
    """

    places: Sequence[int]
    texts: Sequence[str | AnypoolError]
    kept: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, start: int, end: int) -> Block:
        kept = {name: column[start:end] for name, column in self.kept.items()}
        return Block(places=self.places[start:end], texts=self.texts[start:end], kept=kept)

    def pieces(self) -> Iterator[Block]:
        """The block in pieces of no more characters than are run at a time."""
        start = characters = 0
        for index, text in enumerate(self.texts):
            size = len(text) if isinstance(text, str) else 0
            if index > start and characters + size > _BLOCK_CHARACTERS:
                yield self.part(start, index)
                start, characters = index, 0
            characters += size
        if start < len(self):
            yield self.part(start, len(self))


def in_blocks(rows: Iterable[Row], names: Sequence[str]) -> Iterator[Block]:
    """Rows in blocks; `names` are those of their `kept`."""
    gathered: list[Row] = []
    characters = 0
    for row in rows:
        gathered.append(row)
        characters += len(row.text) if isinstance(row.text, str) else 0
        if len(gathered) == BLOCK_ROWS or characters >= _BLOCK_CHARACTERS:
            yield _block(gathered, names)
            gathered, characters = [], 0
    if gathered:
        yield _block(gathered, names)


def _block(rows: Sequence[Row], names: Sequence[str]) -> Block:
    kept = {name: [row.kept[place] for row in rows] for place, name in enumerate(names)}
    return Block(places=[row.place for row in rows], texts=[row.text for row in rows], kept=kept)


@dataclass(frozen=True)
class Failure:
    """A row without a result: its number in the whole input from 0, where it is, and why."""

    index: int
    where: str
    error: AnypoolError


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of a block.

    Attributes:
        position: How far the job has read with it.
        columns: `index`, what is kept, and the results, of the rows that have one.
        failures: The other rows.
        tokens: How many were run.
    """

    position: Position
    columns: Mapping[str, Column]
    failures: Sequence[Failure]
    tokens: int

    def __len__(self) -> int:
        return len(self.columns["index"])

    @property
    def nbytes(self) -> int:
        """Bytes of the results, without what is kept."""
        return sum(_nbytes(column) for column in self.columns.values())


def _nbytes(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes
    return sum(one.nbytes for one in column) if len(column) and isinstance(column[0], np.ndarray) else 0


def joined(columns: Sequence[Column]) -> Column:
    """The columns of several blocks as one; values where files have them in different types."""
    first = columns[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if any(isinstance(column, list) for column in columns) or any(column.type != first.type for column in columns):
        lists = (column if isinstance(column, list) else column.to_pylist() for column in columns)
        return [value for one in lists for value in one]
    import pyarrow  # theirs are of pyarrow then

    return pyarrow.chunked_array(columns)

"""What a bulk job reads: files, a folder or a pattern of them, lines from stdin, or texts."""

from __future__ import annotations

import glob
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from anypool.entrypoints.bulk.blocks import Block, Position, Row, in_blocks
from anypool.entrypoints.bulk.readers import READERS, damage_named, ending_of, reader_of, unit_of
from anypool.errors import InvalidParameterError

Blocks = Generator[tuple[Block, Position], None, None]


class Source(Protocol):
    """Rows in a fixed order."""

    def blocks(self, position: Position) -> Blocks:
        """The rows after a position in blocks, each with the position after it."""

    def first(self) -> Block | None:
        """The first block, which `blocks` gives nevertheless; None where there are no rows."""

    def total(self) -> int | None:
        """How many rows there are, where that is known without reading them."""

    def where(self, file: int, place: int) -> str:
        """A row's place, for messages."""

    def identity(self) -> Any:
        """What another run compares to know that it reads the same, as JSON; None where it cannot."""


@dataclass(frozen=True)
class Files:
    """Rows of files.

    Args:
        paths: The files, in order.
        field: The column of texts.
        keep: Columns to keep beside the results.
    """

    paths: Sequence[Path]
    field: str = "text"
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        for path in self.paths:
            reader_of(path)
            path.open("rb").close()  # says so now where it cannot be read

    def blocks(self, position: Position) -> Blocks:
        rows = position.rows
        for file in range(position.file, len(self.paths)):
            path, start = self.paths[file], position.place if file == position.file else 0
            for block in reader_of(path)(path, self.field, self.keep, start):
                rows += len(block)
                yield block, Position(file, block.places[-1], rows)

    def first(self) -> Block | None:
        with closing(self.blocks(Position())) as blocks:
            return next((block for block, _ in blocks), None)

    def total(self) -> int | None:
        if any(ending_of(path) != ".parquet" for path in self.paths):
            return None
        import pyarrow  # optional
        from pyarrow import parquet

        rows = 0
        for path in self.paths:
            with damage_named(path, pyarrow.ArrowException):
                rows += int(parquet.read_metadata(path).num_rows)
        return rows

    def where(self, file: int, place: int) -> str:
        path = self.paths[file]
        return f"{path}: {unit_of(path)} {place}"

    def identity(self) -> Any:
        files = [(str(path.resolve()), path.stat()) for path in self.paths]
        return [{"path": path, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for path, stat in files]


class Texts:
    """Texts that are no file's: of the command line, or the lines of stdin. They are read once, from the start.

    Args:
        texts: The texts.
        name: What each is called in messages, with its number from 1 after it.
    """

    def __init__(self, texts: Iterable[str], name: str) -> None:
        self.name = name
        self._blocks = in_blocks((Row(place, text) for place, text in enumerate(texts, start=1)), ())
        self._first: Block | None = None

    def blocks(self, position: Position) -> Blocks:
        rows = 0
        for block in chain([self._first] if self._first is not None else [], self._blocks):
            rows += len(block)
            yield block, Position(0, block.places[-1], rows)

    def first(self) -> Block | None:
        self._first = next(self._blocks, None)
        return self._first

    def total(self) -> int | None:
        return None

    def where(self, file: int, place: int) -> str:
        return f"{self.name} {place}"

    def identity(self) -> Any:
        return None


def find_files(given: Sequence[str]) -> list[Path]:
    """The files that names, folders and patterns stand for, those of one folder or pattern by name.

    Raises:
        InvalidParameterError: One stands for none, or a file is there twice.
    """
    found: list[Path] = []
    for name in given:
        found += _find(name)
    if len(set(found)) < len(found):
        twice = next(path for path in found if found.count(path) > 1)
        raise InvalidParameterError(f"{twice} is in the input twice")
    return found


def refuse_output_in_input(given: Sequence[str], output: Path) -> None:
    """Refuses an output that would take the place of an input, or be one when the same command is given again.

    Raises:
        InvalidParameterError: It is one of the inputs, or lies in a folder of them under a name that is read.
    """
    output = output.resolve()
    for name in given:
        path = Path(name).resolve()
        if path == output and path.is_file():
            raise InvalidParameterError(f"{output} is the input too, which would be lost: give another output")
        inside = output.relative_to(path).parts if path.is_dir() and output.is_relative_to(path) else ()
        if inside and not any(part.startswith((".", "_")) for part in inside):
            raise InvalidParameterError(
                f"{output} lies in the input {name}, and would be read as part of it when the command is given again: "
                "give another output, or one whose name begins with _"
            )


def _find(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        inside = (one.relative_to(path) for one in path.rglob("*") if one.is_file() and ending_of(one) in READERS)
        files = sorted(path / one for one in inside if not any(part.startswith((".", "_")) for part in one.parts))
        if not files:
            raise InvalidParameterError(f"{name}: there is no file in it that ends in {', '.join(READERS)}")
        return files
    if not path.exists() and glob.has_magic(name):
        files = sorted(one for one in map(Path, glob.glob(name, recursive=True)) if one.is_file())
        if not files:
            raise InvalidParameterError(f"{name}: no file has such a name")
        return files
    return [path]

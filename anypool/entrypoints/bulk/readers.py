"""Files of rows, read in blocks: lines, JSON lines, CSV, Parquet and Arrow."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from anypool.entrypoints.bulk.blocks import BLOCK_ROWS, Block, Row, in_blocks
from anypool.entrypoints.cli_files import check_pyarrow
from anypool.errors import InvalidParameterError, InvalidPromptError

# The file, the column of texts, those to keep, and how many places of it have been read already -> its blocks.
Reader = Callable[[Path, str, Sequence[str], int], Iterator[Block]]

# Longest field of a CSV file; Python's own limit is 128 KiB.
_CSV_FIELD = 1 << 30
_BYTE_ORDER_MARK = "\ufeff"


def reader_of(path: Path) -> Reader:
    """What reads a file, by its ending.

    Raises:
        InvalidParameterError: Nothing does.
        MissingDependencyError: It takes pyarrow, which is not installed.
    """
    ending = ending_of(path)
    if ending in (".json", ".npy", ".xlsx", ".zip", ".zst", ".bz2"):
        raise InvalidParameterError(
            f"{path} is not read: known endings are {', '.join(READERS)}, those of text also with .gz after them; "
            "anything else is taken for lines of text"
        )
    reader = READERS.get(ending, read_text)
    if reader in (_read_parquet, _read_arrow):
        if path.suffix == ".gz":
            raise InvalidParameterError(f"{path} is not read: {ending} files are compressed inside")
        check_pyarrow(str(path))
    return reader


def ending_of(path: Path) -> str:
    """`.jsonl` of both `a.jsonl` and `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def unit_of(path: Path) -> str:
    """What the places in a file count."""
    return "row" if ending_of(path) in (".csv", ".tsv", ".parquet", ".arrow", ".feather") else "line"


def read_text(path: Path, field: str, keep: Sequence[str], start: int) -> Iterator[Block]:
    """A text per line, empty ones too. The one column there is has the name that is asked for."""
    for name in keep:
        if name != field:
            raise InvalidParameterError(f"{path} has lines of text and no column {name!r} to keep")
    with _opened(path) as file:
        texts = ((number, _text_of(line, number, path)) for number, line in _numbered(file, start))
        yield from in_blocks((Row(number, text, (text,) * len(keep)) for number, text in texts), keep)


def _read_jsonl(path: Path, field: str, keep: Sequence[str], start: int) -> Iterator[Block]:
    def rows(file: IO[bytes]) -> Iterator[Row]:
        for number, line in _numbered(file, start):
            if line.strip():
                yield _json_row(_text_of(line, number, path), number)

    def _json_row(line: str | InvalidPromptError, number: int) -> Row:
        none = (None,) * len(keep)
        if not isinstance(line, str):
            return Row(number, line, none)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Row(number, InvalidPromptError(f"{path}: line {number} is not JSON: {error}"), none)
        if keep and not isinstance(value, dict):
            problem = f"{path}: line {number} is not an object, so it has no {keep[0]!r} to keep"
            return Row(number, InvalidPromptError(problem), none)
        kept = tuple(value.get(name) for name in keep)
        text = value.get(field) if isinstance(value, dict) else value
        if isinstance(text, str):
            return Row(number, text, kept)
        problem = (
            f"{path}: line {number} is neither a string nor an object with a string in {field!r}; "
            "--input-field names another field"
        )
        return Row(number, InvalidPromptError(problem), kept)

    with _opened(path) as file:
        yield from in_blocks(rows(file), keep)


def _read_csv(path: Path, field: str, keep: Sequence[str], start: int) -> Iterator[Block]:
    def lines(file: IO[bytes]) -> Iterator[str]:
        for number, line in _numbered(file, 0):
            text = _decoded(line, number, path)
            if not isinstance(text, str):
                raise text  # where the record that it is part of ends, nobody knows
            yield text

    def rows(file: IO[bytes]) -> Iterator[Row]:
        csv.field_size_limit(_CSV_FIELD)
        records = csv.reader(lines(file), delimiter="\t" if ending_of(path) == ".tsv" else ",", strict=True)
        try:
            header = next(records, [])
            _check_columns(path, header, field, keep)
            places = [header.index(name) for name in (field, *keep)]
            for number, record in enumerate((one for one in records if one), start=1):
                if number > start:
                    values = [record[place] if place < len(record) else None for place in places]
                    problem = InvalidPromptError(f"{path}: row {number} has no {field!r}: it ends before")
                    yield Row(number, problem if values[0] is None else values[0], tuple(values[1:]))
        except csv.Error as error:
            raise InvalidPromptError(f"{path}: line {records.line_num} is not CSV: {error}") from None

    with _opened(path) as file:
        yield from in_blocks(rows(file), keep)


def _read_parquet(path: Path, field: str, keep: Sequence[str], start: int) -> Iterator[Block]:
    import pyarrow  # optional
    from pyarrow import parquet

    with damage_named(path, pyarrow.ArrowException), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        _check_columns(path, file.schema_arrow.names, field, keep)
        before, group = 0, 0
        while group < file.num_row_groups and before + file.metadata.row_group(group).num_rows <= start:
            before += file.metadata.row_group(group).num_rows
            group += 1
        groups = range(group, file.num_row_groups)
        columns = list(dict.fromkeys((field, *keep)))
        batches = file.iter_batches(BLOCK_ROWS, row_groups=groups, columns=columns, use_threads=False)
        yield from _table_blocks(path, batches, field, keep, start, before)


def _read_arrow(path: Path, field: str, keep: Sequence[str], start: int) -> Iterator[Block]:
    """The file format and the stream format of Arrow's IPC, which share their endings."""
    import pyarrow  # optional

    def batches(source: Any) -> Iterator[Any]:
        try:
            reader = pyarrow.ipc.open_file(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            _check_columns(path, stream.schema.names, field, keep)
            yield from stream
            return
        _check_columns(path, reader.schema.names, field, keep)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)

    with damage_named(path, pyarrow.ArrowException), pyarrow.OSFile(str(path)) as source:
        yield from _table_blocks(path, batches(source), field, keep, start, 0)


def _table_blocks(
    path: Path, batches: Iterable[Any], field: str, keep: Sequence[str], start: int, before: int
) -> Iterator[Block]:
    """Blocks of record batches, the first of which begins after `before` rows, from row `start` on."""
    for batch in batches:
        for offset in range(0, batch.num_rows, BLOCK_ROWS):
            piece = batch.slice(offset, BLOCK_ROWS)
            skipped = min(max(0, start - before), piece.num_rows)
            piece, first = piece.slice(skipped), before + skipped + 1
            before += skipped + piece.num_rows
            places = range(first, first + piece.num_rows)
            values = piece.column(field).to_pylist()
            texts = [
                value if isinstance(value, str) else _no_text(path, place, field, value)
                for place, value in zip(places, values, strict=True)
            ]
            yield from Block(places=places, texts=texts, kept={name: piece.column(name) for name in keep}).pieces()


def _no_text(path: Path, place: int, field: str, value: object) -> InvalidPromptError:
    what = "null" if value is None else f"a {type(value).__name__}"
    return InvalidPromptError(f"{path}: row {place} has {what} in {field!r} and no text")


def _check_columns(path: Path, names: Sequence[str], field: str, keep: Sequence[str]) -> None:
    for name in (field, *keep):
        if name not in names:
            flag = "--input-field" if name == field else "--keep"
            raise InvalidParameterError(f"{path} has no column {name!r} ({flag}); it has {', '.join(names) or 'none'}")
        if list(names).count(name) > 1:
            raise InvalidParameterError(
                f"{path} has {list(names).count(name)} columns {name!r}, and which is meant cannot be said: rename one"
            )


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with damage_named(path), cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        yield file


def _numbered(file: Iterable[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file after the first `start`, each with its number."""
    return ((number, line) for number, line in enumerate(file, start=1) if number > start)


def _text_of(line: bytes, number: int, path: Path) -> str | InvalidPromptError:
    """A line without its end."""
    return _decoded(line.rstrip(b"\r\n"), number, path)


def _decoded(line: bytes, number: int, path: Path) -> str | InvalidPromptError:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return InvalidPromptError(f"{path}: line {number} is not UTF-8: {error.reason}")
    return text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text


@contextmanager
def damage_named(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Names the file that is cut off or damaged, which its reader does not: the system, gzip and those of `kinds`."""
    told: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, *kinds)
    try:
        yield
    except told as error:
        raise InvalidPromptError(f"{path} cannot be read: {error}") from error


READERS: Mapping[str, Reader] = {
    ".txt": read_text,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}

"""What commands read and write: texts from the arguments or a file, results to stdout or a file."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from anypool.errors import InvalidParameterError, InvalidPromptError, MissingDependencyError

# Columns of equal length: lists of what JSON can hold, or arrays whose first axis is the rows.
Columns = Mapping[str, "Sequence[Any] | np.ndarray"]


def add_file_flags(parser: argparse.ArgumentParser, *, texts: str, metavar: str, endings: Sequence[str]) -> None:
    """Adds the texts, `--input`, `--input-field` and `--output`.

    Args:
        parser: The command's.
        texts: What the texts are, such as "a text to embed".
        metavar: Their name in the help.
        endings: Of the files that it writes.
    """
    parser.add_argument("texts", metavar=metavar, nargs="*", help=f"{texts}; write -- before one that starts with -")
    parser.add_argument("--input", metavar="FILE", help=".jsonl, or lines of text; - for lines from stdin")
    parser.add_argument(
        "--input-field", metavar="NAME", default="text", help="the field of a .jsonl object to read (default: text)"
    )
    parser.add_argument("--output", metavar="FILE", help=f"{', '.join(endings)}; without it, JSON lines go to stdout")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--prompt-name`, `--truncate` and `--truncate-prompt-tokens`."""
    parser.add_argument("--prompt-name", metavar="NAME", help="which of the model's prompts to put before each text")
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument(
        "--truncate",
        dest="truncate_prompt_tokens",
        action="store_const",
        const=-1,
        help="cut longer texts to the model's limit",
    )
    cut.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help="cut longer texts to this many tokens")


def read_texts(arguments: argparse.Namespace, *, what: str) -> list[str]:
    """The texts that were given, as arguments or in a file.

    Raises:
        InvalidParameterError: Neither were given, or both.
        InvalidPromptError: The file holds something else.
    """
    if arguments.input is None:
        if not arguments.texts:
            raise InvalidParameterError(f"nothing to {what}: give texts, or --input FILE")
        return list(arguments.texts)
    if arguments.texts:
        raise InvalidParameterError("texts and --input were both given: give one of them")
    if arguments.input == "-":
        return list(read_lines(sys.stdin.buffer, "stdin"))
    with Path(arguments.input).open("rb") as file:
        lines = read_lines(file, arguments.input)
        if Path(arguments.input).suffix == ".jsonl":
            return list(_fields(lines, arguments.input, arguments.input_field))
        return list(lines)


def read_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a UTF-8 file, empty ones too: line N is text N."""
    for number, line in enumerate(file, start=1):
        try:
            yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidPromptError(f"{name}: line {number} is not UTF-8: {error.reason}") from None


def _fields(lines: Iterable[str], name: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidPromptError(f"{name}: line {number} is not JSON: {error}") from None
        text = value.get(field) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InvalidPromptError(
                f"{name}: line {number} is neither a string nor an object with a string in {field!r}; "
                "--input-field names another field"
            )
        yield text


def check_output(given: str | None, endings: Sequence[str]) -> Path | None:
    """The path of `--output`; raises where nothing could be written to it."""
    if given is None:
        return None
    path = Path(given)
    if path.suffix not in endings:
        raise InvalidParameterError(f"--output {path}: known endings are {', '.join(endings)}")
    if path.suffix in (".parquet", ".arrow"):
        check_pyarrow(f"--output {path}")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"--output {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidParameterError(f"--output {path}: cannot be written to")
    return path


def check_pyarrow(what: str) -> None:
    """Raises where pyarrow, which `what` needs, is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError(f"{what} needs pyarrow: pip install 'anypool[parquet]'")


def write(output: Path | None, columns: Columns) -> None:
    """Writes a row per result, as JSON lines to stdout where there is no file.

    Args:
        output: A file with one of the endings of `WRITERS`; .npy takes the last column.
        columns: The results.
    """
    if output is None:
        sys.stdout.buffer.writelines(json_lines(columns))  # UTF-8, whatever the terminal's encoding
        sys.stdout.flush()
        return
    with atomic_file(output) as file:
        WRITERS[output.suffix](file, columns)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is at `path` when it is complete and on the disk, and never before."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Has the disk know a folder's names, where the system can: on POSIX ones."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def json_lines(columns: Columns) -> Iterator[bytes]:
    """A line per row."""
    values = (column.to_pylist() if hasattr(column, "to_pylist") else column for column in columns.values())
    for row in zip(*values, strict=True):
        plain = (value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value for value in row)
        line = dict(zip(columns, plain, strict=True))
        text = json.dumps(line, separators=(",", ":"), ensure_ascii=False, default=_json_value)
        yield text.encode(errors="backslashreplace") + b"\n"  # half of a pair: JSON writes it as Python does, \\ud83d


def _json_value(value: Any) -> Any:
    """What JSON has no word for, such as dates and decimals of a table, as its text; bytes in base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _write_jsonl(file: IO[bytes], columns: Columns) -> None:
    file.writelines(json_lines(columns))


def _write_npy(file: IO[bytes], columns: Columns) -> None:
    *_, last = columns.values()
    np.save(file, last)


def _write_parquet(file: IO[bytes], columns: Columns) -> None:
    from pyarrow import parquet  # optional

    table = table_of(columns)
    with _refusal_told(".parquet"):
        parquet.write_table(table, file, use_dictionary=repeating(table))


def _write_arrow(file: IO[bytes], columns: Columns) -> None:
    import pyarrow  # optional

    table = table_of(columns)
    with _refusal_told(".arrow"), pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def _refusal_told(ending: str) -> Iterator[None]:
    """A table with types that a format does not have is the user's error."""
    import pyarrow  # optional

    try:
        yield
    except pyarrow.ArrowException as error:
        raise InvalidPromptError(f"a {ending} cannot have such rows: {error}; .jsonl takes any") from error


def repeating(table: Any) -> list[str]:
    """The columns of a table whose values may be there many times, which those of vectors are not."""
    import pyarrow  # optional

    return [field.name for field in table.schema if not pyarrow.types.is_nested(field.type)]


def table_of(columns: Columns) -> Any:
    """A pyarrow table; rows of a matrix are lists of a fixed size.

    Values of a dictionary stand for themselves: an Arrow file has one for all its rows, and parts have each their own.
    """
    import pyarrow  # optional

    def array(name: str, column: Any) -> Any:
        if isinstance(column, np.ndarray) and column.ndim == 2:
            return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1)), column.shape[1])
        if isinstance(column, (pyarrow.Array, pyarrow.ChunkedArray)):
            return column.cast(column.type.value_type) if pyarrow.types.is_dictionary(column.type) else column
        try:
            return pyarrow.array(column)
        except pyarrow.ArrowException as error:
            raise InvalidPromptError(
                f"column {name!r} has values of several types, and a table's have one: {error}; .jsonl takes any"
            ) from error
        except (OverflowError, UnicodeEncodeError) as error:  # more than 64 bits; half of a surrogate pair
            raise InvalidPromptError(
                f"column {name!r} has a value that a table cannot have: {error}; .jsonl takes any"
            ) from error

    return pyarrow.table({name: array(name, column) for name, column in columns.items()})


WRITERS: Mapping[str, Callable[[IO[bytes], Columns], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
}
ROW_ENDINGS = (".jsonl", ".parquet", ".arrow")

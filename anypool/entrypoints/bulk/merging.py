"""Parts of a result put together to one file, one part at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from anypool.entrypoints.cli_files import Columns, repeating, table_of
from anypool.errors import InvalidPromptError


def _merge_npy(file: IO[bytes], parts: Sequence[Path]) -> None:
    rows = sum(len(np.load(part, mmap_mode="r")) for part in parts)  # one after the other: each is an open file
    first = np.load(parts[0], mmap_mode="r")
    header = {
        "descr": np.lib.format.dtype_to_descr(first.dtype),
        "fortran_order": False,
        "shape": (rows, *first.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(file, header)
    for part in parts:
        file.write(np.ascontiguousarray(np.load(part)).data)


def _merge_jsonl(file: IO[bytes], parts: Sequence[Path]) -> None:
    for part in parts:
        with part.open("rb") as opened:
            shutil.copyfileobj(opened, file)


def _merge_parquet(file: IO[bytes], parts: Sequence[Path]) -> None:
    from pyarrow import parquet  # optional

    schema = parquet.read_schema(parts[0])
    with parquet.ParquetWriter(file, schema, use_dictionary=repeating(schema.empty_table())) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part))


def _merge_arrow(file: IO[bytes], parts: Sequence[Path]) -> None:
    import pyarrow  # optional

    def table(part: Path) -> Any:
        return pyarrow.ipc.open_file(str(part)).read_all()

    with pyarrow.ipc.new_file(file, table(parts[0]).schema) as writer:
        for part in parts:
            writer.write_table(table(part))


MERGERS: Mapping[str, Callable[[IO[bytes], Sequence[Path]], None]] = {
    ".npy": _merge_npy,
    ".jsonl": _merge_jsonl,
    ".parquet": _merge_parquet,
    ".arrow": _merge_arrow,
}


def like_part(columns: Columns, part: Path | None) -> Columns:
    """The columns with the types that another part has, where the format has types.

    Raises:
        InvalidPromptError: They have values that are not of these.
    """
    if part is None or part.suffix not in (".parquet", ".arrow"):
        return columns
    import pyarrow  # optional
    from pyarrow import parquet

    schema = parquet.read_schema(part) if part.suffix == ".parquet" else pyarrow.ipc.open_file(str(part)).schema
    table, arrays = table_of(columns), {}
    for name in table.column_names:
        kind, given = schema.field(name).type, table.column(name)
        if given.type != kind and not pyarrow.types.is_null(given.type):
            raise InvalidPromptError(
                f"column {name!r} has {given.type} here and {kind} in the rows before; a column of {part.suffix} has "
                "one type: write .jsonl, which takes any value, or leave it out of --keep"
            )
        arrays[name] = given.cast(kind)
    return arrays

"""Bulk embedding of files that are damaged, or hold what nobody expects: an error that names them, or every row."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from anypool.entrypoints.bulk.blocks import BLOCK_ROWS
from tests.entrypoints.test_bulk import TEXTS, embed, read, write

_GZIP = gzip.compress("\n".join(json.dumps({"text": f"{text} {n}"}) for n in range(999) for text in TEXTS).encode())


def error_of(capsys: pytest.CaptureFixture[str], *flags: str | Path) -> str:
    assert embed(*flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("anypool: error: ")
    return error


@pytest.mark.parametrize("damaged", [_GZIP[:-900], _GZIP[:99] + b"odd bytes" + _GZIP[108:], b"no gzip", _GZIP[:-1]])
def test_damaged_gzip_is_an_error_that_names_it(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, damaged: bytes
) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(damaged)
    assert "in.jsonl.gz cannot be read: " in error_of(
        capsys, "--input", tmp_path / "in.jsonl.gz", "--output", tmp_path / "out.npy"
    )


def test_damaged_file_behind_a_good_one_is_named(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "1.parquet", TEXTS)
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-9])
    error = error_of(capsys, "--input", tmp_path / "*.parquet", "--output", tmp_path / "out.npy")
    assert "2.parquet cannot be read: " in error


def test_page_that_does_not_have_its_checksum_is_an_error(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = pyarrow.table({"text": TEXTS})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, tmp_path / "in.parquet", write_page_checksum=True, **plain)
    whole = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(whole.replace(b"a red boat", b"a rad boat", 1))
    error = error_of(capsys, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out.npy")
    assert "in.parquet cannot be read: " in error


@pytest.mark.parametrize("name", ["in.csv", "in.parquet", "in.arrow"])
@pytest.mark.parametrize("twice", ["text", "key"])
def test_column_that_is_there_twice_is_an_error(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, twice: str
) -> None:
    names = ["key", "text", twice]
    table = pyarrow.table([TEXTS, TEXTS, TEXTS], names=names)
    match Path(name).suffix:
        case ".csv":
            (tmp_path / name).write_text(f"{','.join(names)}\n1,2,3\n", encoding="utf-8")
        case ".parquet":
            parquet.write_table(table, tmp_path / name)
        case ".arrow":
            with pyarrow.ipc.new_file(str(tmp_path / name), table.schema) as writer:
                writer.write_table(table)
    flags = ("--input", tmp_path / name, "--keep", "key", "--output", tmp_path / "out.parquet")
    assert f"has 2 columns {twice!r}" in error_of(capsys, *flags)


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("output", ["out.parquet", "out.arrow", "out.jsonl", "out"])
def test_first_part_may_have_no_row_that_can_be_run(
    loads: list[str], tmp_path: Path, output: str, precision: str
) -> None:
    texts = [*[None] * BLOCK_ROWS, *TEXTS]
    parquet.write_table(pyarrow.table({"text": texts, "key": range(len(texts))}), tmp_path / "in.parquet")
    flags = ("--input", tmp_path / "in.parquet", "--keep", "key", "--on-error", "skip", "--rows-per-part", "1")
    assert embed(*flags, "--precision", precision, "--output", tmp_path / output) == 0
    expected = list(range(BLOCK_ROWS, len(texts)))
    if output == "out.jsonl":
        rows = [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]
    elif output == "out.arrow":
        rows = pyarrow.ipc.open_file(str(tmp_path / output)).read_all().to_pylist()
    else:
        rows = parquet.read_table(tmp_path / output).to_pylist()
    assert [row["index"] for row in rows] == [row["key"] for row in rows] == expected


@pytest.mark.parametrize("texts", [[], [None, None]])
def test_result_without_rows_has_its_columns(loads: list[str], tmp_path: Path, texts: list[Any]) -> None:
    table = pyarrow.table({"text": pyarrow.array(texts, "string"), "key": pyarrow.array(range(len(texts)), "int32")})
    parquet.write_table(table, tmp_path / "in.parquet")
    flags = ("--input", tmp_path / "in.parquet", "--keep", "key", "--on-error", "skip")
    assert embed(*flags, "--output", tmp_path / "out.parquet") == 0
    found = parquet.read_table(tmp_path / "out.parquet")
    assert (found.column_names, len(found)) == (["index", "key", "embedding"], 0)
    assert found.schema.field("embedding").type.list_size == 384


@pytest.mark.parametrize("rows_per_part", ["1", "10000"])
@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".jsonl"])
def test_kept_columns_of_dictionaries_keep_their_values(
    loads: list[str], tmp_path: Path, ending: str, rows_per_part: str
) -> None:
    keys = ["a", "b", "c", "a", "d"]
    for name, start in (("1.parquet", 0), ("2.parquet", 2)):
        column = pyarrow.array(keys[start : start + 3]).dictionary_encode()
        parquet.write_table(pyarrow.table({"text": TEXTS[:3], "key": column}), tmp_path / name)
    output = tmp_path / f"out{ending}"
    flags = ("--input", tmp_path / "*.parquet", "--keep", "key", "--rows-per-part", rows_per_part)
    assert embed(*flags, "--output", output) == 0
    if ending == ".jsonl":
        found = [json.loads(line)["key"] for line in output.read_text().splitlines()]
    else:
        table = parquet.read_table(output) if ending == ".parquet" else pyarrow.ipc.open_file(str(output)).read_all()
        found = table["key"].to_pylist()
    assert found == [*keys[:3], *keys[2:]]


@pytest.mark.parametrize("order", [("1.parquet", "2.parquet"), ("1.parquet", "3.jsonl"), ("3.jsonl", "1.parquet")])
def test_files_may_have_a_kept_column_in_other_types(loads: list[str], tmp_path: Path, order: tuple[str, str]) -> None:
    for name, kind in (("1.parquet", "int32"), ("2.parquet", "int64")):
        column = pyarrow.array(range(len(TEXTS)), kind)
        parquet.write_table(pyarrow.table({"text": TEXTS, "key": column}), tmp_path / name)
    write(tmp_path / "3.jsonl", TEXTS)
    inputs = [flag for name in order for flag in ("--input", tmp_path / name)]
    assert embed(*inputs, "--keep", "key", "--output", tmp_path / "out.parquet") == 0
    assert parquet.read_table(tmp_path / "out.parquet")["key"].to_pylist() == [*range(len(TEXTS))] * 2


@pytest.mark.parametrize("value", ['"\\ud83d"', "123456789012345678901234567890", "{}"])
def test_kept_value_that_a_table_cannot_have_is_an_error_and_json_takes_it(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, value: str
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a", "key": {value}}}\n', encoding="utf-8")
    flags = ("--input", tmp_path / "in.jsonl", "--keep", "key", "--output")
    assert ".jsonl takes any" in error_of(capsys, *flags, tmp_path / "out.parquet")
    assert embed(*flags, tmp_path / "out.jsonl") == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["key"] == json.loads(value)


def test_many_parts_are_not_open_at_once(loads: list[str], tmp_path: Path) -> None:
    for number in range(150):
        (tmp_path / f"{number:03}.txt").write_text(f"{number}", encoding="utf-8")
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, most))
    try:
        flags = ("--input", tmp_path / "*.txt", "--rows-per-part", "1")
        assert embed(*flags, "--output", tmp_path / "out.npy") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert np.load(tmp_path / "out.npy").shape == (150, 384)


def test_output_is_never_an_input(loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.parquet", TEXTS)
    before = (folder / "a.parquet").read_bytes()
    flags = ("--input", folder / "a.parquet", "--output", folder / "a.parquet")
    assert "is the input too, which would be lost" in error_of(capsys, *flags)
    for inside in (folder / "vectors", folder / "deep" / "out.parquet", folder / "out.jsonl"):
        inside.parent.mkdir(exist_ok=True)
        assert "would be read as part of it" in error_of(capsys, "--input", folder, "--output", inside)
    assert (folder / "a.parquet").read_bytes() == before
    for _ in range(2):
        assert embed("--input", folder, "--output", folder / "_vectors") == 0
    assert len(read(folder / "_vectors")) == len(TEXTS)

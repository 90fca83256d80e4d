"""Bulk embedding: whatever the files and whenever it is killed, every row is there once, as the engine alone has it."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from filelock import FileLock
from pyarrow import parquet

from anypool.engine.engine import Engine
from anypool.entrypoints.bulk.blocks import Position
from anypool.entrypoints.bulk.sources import Files, find_files
from anypool.entrypoints.cli import main
from anypool.pooling.quantize import quantize_embeddings
from anypool.pooling.tasks import PoolingTask
from benchmarks.bulk import TOLERANCE, compare, finish, kill_after, peak_mb, start, write_rows

TEXTS = ["a red boat", "größer als", "the city at night", 'bread, and "butter"', "one more line"]


@pytest.fixture
def expected(engine: Engine) -> Callable[[Sequence[str]], np.ndarray]:
    def embed(texts: Sequence[str]) -> np.ndarray:
        requests = engine.prepare(texts, PoolingTask.EMBED)
        engine.submit(requests)
        return np.stack([request.future.result().numpy() for request in requests])

    return embed


def embed(*argv: str | Path) -> int:
    return main(["embed", "m", *map(str, argv)])


def vectors(table: pyarrow.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    return np.asarray(column.flatten()).reshape(len(column), -1)


def write(path: Path, texts: Sequence[str]) -> None:
    """A file of texts in `text` and numbers in `key`, in the format of its ending."""
    lines = [json.dumps({"key": key, "text": text}, ensure_ascii=False) for key, text in enumerate(texts)]
    table = pyarrow.table({"key": list(range(len(texts))), "text": list(texts)})
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_text("\n\n".join(lines), encoding="utf-8")
        case ".jsonl.gz":
            path.write_bytes(gzip.compress("\n".join(lines).encode()))
        case ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("key", "text"), *enumerate(texts)])
        case ".parquet":
            parquet.write_table(table, path, row_group_size=2)
        case ".arrow":
            with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
        case ".feather":  # the stream format, which data sets are kept in
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv", "in.parquet", "in.arrow", "in.feather"])
def test_every_format_gives_the_same_rows_with_their_keys(
    loads: list[str], expected: Callable[..., np.ndarray], tmp_path: Path, name: str
) -> None:
    write(tmp_path / name, TEXTS)
    assert embed("--input", tmp_path / name, "--keep", "key", "--output", tmp_path / "out.parquet") == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    assert [str(key) for key in table["key"].to_pylist()] == [str(key) for key in range(len(TEXTS))]
    np.testing.assert_allclose(vectors(table), expected(TEXTS), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet", "in.arrow", "in.feather"])
def test_reading_goes_on_after_any_row(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TEXTS)
    source = Files([tmp_path / name], keep=("key",))
    blocks = [block for block, _ in source.blocks(Position())]
    places = [place for block in blocks for place in block.places]
    for read, place in enumerate(places, start=1):
        left = [text for block, _ in source.blocks(Position(0, place, read)) for text in block.texts]
        assert left == TEXTS[read:]
    assert len(places) == len(TEXTS)


def test_folder_of_files_becomes_a_folder_of_parts_that_reads_as_one_table(
    loads: list[str], expected: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write(source / "b.parquet", TEXTS[2:])
    write(source / "a.parquet", TEXTS[:2])
    flags = ("--input", source, "--keep", "key", "--output", output, "--rows-per-part", "1")
    assert embed(*flags) == 0
    names = ["_manifest.json", "part-00000.parquet", "part-00001.parquet"]
    assert sorted(path.name for path in output.iterdir()) == names
    table = parquet.read_table(output)
    assert table["index"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["key"].to_pylist() == [0, 1, 0, 1, 2]
    np.testing.assert_allclose(vectors(table), expected(TEXTS), atol=TOLERANCE)
    manifest = json.loads((output / "_manifest.json").read_text())
    assert (manifest["rows"], [part["rows"] for part in manifest["parts"]]) == (5, [2, 3])
    assert embed(*flags) == 0
    assert len(loads) == 1, "nothing is left to do, so nothing is loaded"


@contextmanager
def _dies(monkeypatch: pytest.MonkeyPatch, parts: int) -> Iterator[None]:
    """The process ends, as by a kill, when it is about to note one more part than `parts`."""
    from anypool.entrypoints.bulk.progress import PartDone, Progress

    add = Progress.add

    def note(self: Progress, part: PartDone) -> None:
        if len(self.parts) == parts:
            raise SystemExit
        add(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", note)
        yield


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow", "out.jsonl", "out.npy", "out"])
def test_part_that_was_not_noted_is_made_again(
    loads: list[str],
    expected: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    output: str,
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")  # a block each
    flags = ("--input", folder, "--output", tmp_path / output, "--rows-per-part", "1")
    with _dies(monkeypatch, parts=2), pytest.raises(SystemExit):
        embed(*flags)
    work = tmp_path / output if output == "out" else tmp_path / f"{output}.parts"
    assert len((work / "_progress.jsonl").read_bytes().splitlines()) == 3
    with (work / "_progress.jsonl").open("ab") as file:
        file.write(b'{"file": "part-000')  # a line that the kill cut
    assert embed(*flags) == 0
    found = read(tmp_path / output)
    np.testing.assert_allclose(found, expected(TEXTS), atol=TOLERANCE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", output])


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        array: np.ndarray = np.load(path)
        return array
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["index"] for row in rows] == list(range(len(rows)))
        return np.array([row["embedding"] for row in rows], np.float32)
    table = pyarrow.ipc.open_file(str(path)).read_all() if path.suffix == ".arrow" else parquet.read_table(path)
    assert table["index"].to_pylist() == list(range(len(table)))
    return vectors(table)


@pytest.fixture
def stopped(loads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Two input files, and the output folder of a job that ended after the first."""
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number], encoding="utf-8")
    source, output = tmp_path / "*.txt", tmp_path / "out"
    with _dies(monkeypatch, parts=1), pytest.raises(SystemExit):
        embed("--input", source, "--output", output, "--rows-per-part", "1")
    return source, output


def test_another_job_is_an_error_that_says_what_is_other(
    stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = stopped
    flags = ("--input", source, "--output", output)
    for more, words in (
        (("--dimensions", "8"), 'params: {} before, {"dimensions": 8} now'),
        (("--precision", "float16"), 'precision: "float32" before, "float16" now'),
        (("--dtype", "bfloat16"), 'engine: {} before, {"dtype": "bfloat16"} now'),
    ):
        assert embed(*flags, *more) == 2
        assert words in capsys.readouterr().err
    source.with_name("0.txt").write_text("other words", encoding="utf-8")
    assert embed(*flags) == 2
    assert "has the work of another job (input: " in capsys.readouterr().err
    assert embed(*flags, "--overwrite") == 0
    assert parquet.read_table(output)["index"].to_pylist() == [0, 1]


def test_two_processes_do_not_write_to_one_folder(
    stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = stopped
    with FileLock(output / "_lock"):
        assert embed("--input", source, "--output", output) == 2
    assert "another process is writing to it" in capsys.readouterr().err


def test_folder_with_other_files_is_left_alone(
    loads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert embed("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--overwrite") == 2
    assert "holds 'thesis.txt', which is no work of anypool embed" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_rows_that_cannot_be_run_stop_the_job_or_are_noted(
    loads: list[str], expected: Callable[..., np.ndarray], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [{"text": "first"}, {"text": "word " * 400}, {"text": "third"}, {"body": 4}, {"text": "last"}]
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert embed("--input", source, "--output", output) == 2
    assert "in.jsonl: line 4 is neither a string nor an object" in capsys.readouterr().err
    assert loads == []
    assert embed("--input", source, "--output", output, "--on-error", "skip") == 0
    table = parquet.read_table(output)
    assert table["index"].to_pylist() == [0, 2, 4]
    np.testing.assert_allclose(vectors(table), expected(["first", "third", "last"]), atol=TOLERANCE)
    errors = [json.loads(line) for line in (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()]
    assert [(one["index"], one["error"]) for one in errors] == [(1, "PromptTooLongError"), (3, "InvalidPromptError")]
    assert "in.jsonl: line 2 has 402 tokens, the limit is 256" in errors[0]["message"]


def test_job_that_a_row_stopped_keeps_what_was_before_it_and_goes_on(
    loads: list[str], expected: Callable[..., np.ndarray], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join([*TEXTS, "word " * 400, "the end"]), encoding="utf-8")
    assert embed("--input", source, "--output", output) == 2
    assert "in.txt: line 6 has 402 tokens" in capsys.readouterr().err
    assert embed("--input", source, "--output", output, "--on-error", "skip") == 0
    assert "5 were there, and 2 were run now" in capsys.readouterr().err
    np.testing.assert_allclose(np.load(output), expected([*TEXTS, "the end"]), atol=TOLERANCE)


def test_eight_bits_keep_the_ranges_of_the_first_part(
    loads: list[str], expected: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.txt").write_text("\n".join(TEXTS[:3]), encoding="utf-8")
    (folder / "1.txt").write_text("\n".join(TEXTS[3:]), encoding="utf-8")
    output = tmp_path / "out"
    assert embed("--input", folder, "--output", output, "--precision", "int8", "--rows-per-part", "1") == 0
    first = expected(TEXTS[:3])
    ranges = np.load(output / "_ranges.npy")
    np.testing.assert_allclose(ranges, [first.min(axis=0), first.max(axis=0)], atol=TOLERANCE)
    stored = quantize_embeddings(expected(TEXTS), "int8", ranges=ranges).astype(int)
    assert np.abs(vectors(parquet.read_table(output)).astype(int) - stored).max() <= 1  # sums in another order


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input", "none*.txt"), "none*.txt: no file has such a name"),
        (("--input", "empty"), "empty: there is no file in it that ends in .txt, .jsonl"),
        (("--input", "in.json"), "in.json is not read: known endings are .txt"),
        (("--input", "in.txt", "--keep", "key"), "in.txt has lines of text and no column 'key' to keep"),
        (("--input", "in.parquet", "--keep", "id"), "in.parquet has no column 'id' (--keep); it has key, text"),
        (("--input", "in.parquet", "--input-field", "body"), "in.parquet has no column 'body' (--input-field)"),
        (("--input", "in.parquet", "--input-field", "key"), "in.parquet: row 1 has a int in 'key' and no text"),
        (("--input", "in.parquet", "--keep", "index"), "--keep index: the name is a column of results"),
        (("--input", "in.txt", "--input", "in.txt"), "in.txt is in the input twice"),
        (("--input", "in.txt", "--rows-per-part", "0"), "--rows-per-part 0 is not a positive number of rows"),
        (("--input", "in.txt", "--output-format", "npy"), "--output-format npy contradicts --output out.parquet"),
        (("--input", "damaged.parquet"), "damaged.parquet cannot be read: "),
    ],
)
def test_users_error_is_found_before_anything_is_loaded(
    loads: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.json", "in.txt"):
        Path(name).write_text("{}\n", encoding="utf-8")
    write(Path("in.parquet"), TEXTS)
    Path("damaged.parquet").write_bytes(b"PAR1")
    Path("empty").mkdir()
    assert embed(*flags, "--output", "out.parquet") == 2
    assert capsys.readouterr().err.startswith(f"anypool: error: {message}")
    assert loads == []
    assert not Path("out.parquet.parts").exists()


def test_hidden_files_of_a_folder_are_no_input(tmp_path: Path) -> None:
    for name in ("a.txt", "_manifest.jsonl", ".b.txt", "c.md"):
        (tmp_path / name).touch()
    assert find_files([str(tmp_path)]) == [tmp_path / "a.txt"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_the_middle_it_goes_on_with_every_row_once(minilm: str, tmp_path: Path) -> None:
    rows = 3000
    source, whole, again = tmp_path / "in.jsonl", tmp_path / "whole.parquet", tmp_path / "again.parquet"
    write_rows(source, rows)
    assert peak_mb(finish(start(minilm, source, whole))) > 0
    log = tmp_path / "again.parquet.parts" / "_progress.jsonl"
    assert kill_after(start(minilm, source, again, "--rows-per-part", "1"), log, parts=1) >= 1
    assert not again.exists()
    finish(start(minilm, source, again, "--rows-per-part", "1"))
    assert compare(whole, again, rows) <= TOLERANCE
    shutil.rmtree(tmp_path)

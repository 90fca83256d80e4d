"""`anypool embed` on files of several sizes: memory that stays flat, and a kill in the middle that costs nothing.

    python benchmarks/bulk.py MODEL --rows 20000 50000 100000

Prints what each size took and the peak memory of its process. The last is run again, killed (SIGKILL) in the middle,
started again, and compared row by row with the run that nothing stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet

WORDS = (
    "river stone market garden winter engine letter mountain paper signal window teacher cloud harbour bread".split()
)
# The same text gives the same vector in whichever batch it is, but for the order of sums.
TOLERANCE = 1e-6


def write_rows(path: Path, rows: int) -> None:
    """Short texts with a key, always the same."""
    choose = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            text = " ".join(choose.choices(WORDS, k=choose.randint(3, 14)))
            file.write(json.dumps({"id": f"doc-{row}", "text": text}) + "\n")


def start(model: str, source: Path, output: Path, *flags: str) -> subprocess.Popen[str]:
    """The command on its way."""
    command = [sys.executable, "-m", "anypool", "embed", model, "--input", str(source), "--keep", "id"]
    return subprocess.Popen([*command, "--output", str(output), *flags], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """The last line of a command that has to end well."""
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(errors)
    return errors.splitlines()[-1]


def kill_after(process: subprocess.Popen[str], log: Path, parts: int) -> int:
    """Kills a command when so many parts are done, and says how many were when it was gone."""
    while process.poll() is None and _lines(log) <= parts:  # the first line is the job's
        time.sleep(0.02)
    process.kill()
    process.communicate()
    return _lines(log) - 1


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def compare(one: Path, other: Path, rows: int) -> float:
    """The largest difference between two results, which must have every row once."""
    first, second = (pyarrow.parquet.read_table(path) for path in (one, other))
    for table in (first, second):
        assert table["index"].to_pylist() == list(range(rows)), "a row is missing, or there twice"
        assert table["id"].to_pylist() == [f"doc-{row}" for row in range(rows)], "a key is at another row"
    return float(np.abs(_vectors(first) - _vectors(second)).max())


def _vectors(table: pyarrow.Table) -> np.ndarray:
    return table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)


def peak_mb(line: str) -> int:
    """What the command says about its memory."""
    found = re.search(r"peak memory ([\d,]+) MB", line)
    assert found is not None, line
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 50_000, 100_000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in arguments.rows:
            source, whole = folder / f"{rows}.jsonl", folder / f"{rows}.parquet"
            write_rows(source, rows)
            print(finish(start(arguments.model, source, whole)), flush=True)
        again = folder / "again.parquet"
        log = folder / "again.parquet.parts" / "_progress.jsonl"
        parts = kill_after(start(arguments.model, source, again), log, parts=max(1, rows // 20_000))
        print(f"killed after {parts} parts; there is a result: {again.exists()}")
        print(finish(start(arguments.model, source, again)))
        difference = compare(whole, again, rows)
        print(f"every row once; largest difference from the run that nothing stopped: {difference:.1e}")
        assert difference <= TOLERANCE


if __name__ == "__main__":
    main()

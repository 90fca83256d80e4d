"""A set of input files, and which of their outputs are there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anypool.entrypoints.bulk.job import PROGRESS
from anypool.entrypoints.bulk.progress import check_same_job, rows_read
from anypool.entrypoints.bulk.sources import Files
from anypool.entrypoints.cli_files import atomic_file
from anypool.errors import EngineError, InvalidParameterError

_JOB = "_job.json"
# How often a partition is begun at one place. Ray itself would do it without end.
MOST_BEGINNINGS = 3


@dataclass(frozen=True)
class Partition:
    """An input file, and the file that its rows become."""

    source: Path
    output: Path

    @property
    def errors(self) -> Path:
        """The rows that were left out, where there are some."""
        return self.output.with_name(f"{self.output.name}.errors.jsonl")

    @property
    def parts(self) -> Path:
        """The folder of what is done of it, until it is complete."""
        return self.output.with_name(f"{self.output.name}.parts")

    @property
    def begun(self) -> Path:
        """How often it was begun at one place, and the rows before that; there as long as an actor has it."""
        return self.output.with_name(f"_{self.output.name}.begun")

    def begin(self) -> None:
        """Notes that an actor begins it, or goes on with it. What a process dies of, it cannot report.

        Raises:
            EngineError: Actors died of it again and again, and none got any further.
        """
        rows = rows_read(self.parts / PROGRESS)
        times, before = json.loads(self.begun.read_bytes()) if self.begun.exists() else (0, rows)
        times = 1 + (times if rows == before else 0)
        if times > MOST_BEGINNINGS:
            raise EngineError(
                f"{self.source}: {MOST_BEGINNINGS} actors died one after the other while they loaded the model or ran "
                f"what comes after row {rows:,}, such as by taking more memory than there is: Ray's logs may say why; "
                "try lower max_num_batched_tokens, fewer actors, or anypool embed with this file alone"
            )
        with atomic_file(self.begun) as file:
            file.write(json.dumps([times, rows]).encode())

    def remove(self) -> None:
        """Removes what was made of it, complete or not."""
        self.output.unlink(missing_ok=True)
        self.errors.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)


def partitions_of(sources: Sequence[Path], folder: Path, ending: str) -> list[Partition]:
    """The partitions of files: in the output folder each lies as in the folder that all inputs share.

    Raises:
        InvalidParameterError: Two files would become one.
    """
    sources = [path.resolve() for path in sources]
    shared = Path(os.path.commonpath([path.parent for path in sources]))
    found: dict[Path, Path] = {}
    for source in sources:
        bare = source.with_suffix("") if source.suffix == ".gz" else source
        output = folder.resolve() / bare.relative_to(shared).with_suffix(ending)
        if output in found:
            raise InvalidParameterError(f"{found[output]} and {source} would both become {output}: rename one")
        found[output] = source
    return [Partition(source, output) for output, source in found.items()]


def left_to_do(
    partitions: Sequence[Partition], folder: Path, job: Mapping[str, Any], *, overwrite: bool
) -> list[Partition]:
    """The partitions whose output is not there, or whose input has changed since it was made.

    Raises:
        InvalidParameterError: The folder has the work of another job.
    """
    path = folder / _JOB
    known: dict[str, Any] = {}
    if path.exists() and not overwrite:
        before = json.loads(path.read_bytes())
        check_same_job(folder, before["job"], dict(job))
        known = before["inputs"]
    elif folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InvalidParameterError(
            f"{folder} is not empty and has no {_JOB} of an earlier run: give an empty or new folder"
        )
    inputs = {str(one.source): Files([one.source]).identity()[0] for one in partitions}
    for one in partitions:
        one.output.parent.mkdir(parents=True, exist_ok=True)
        one.begun.unlink(missing_ok=True)
        if known.get(str(one.source)) != inputs[str(one.source)]:
            one.remove()
    with atomic_file(path) as file:
        file.write(json.dumps({"job": job, "inputs": {**known, **inputs}}, indent=1).encode() + b"\n")
    return [one for one in partitions if not one.output.exists()]

"""A bulk job: rows in, parts on the disk, and nothing lost or done twice when it is killed and started again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

import anypool
from anypool.entrypoints.bulk.blocks import Done, Position
from anypool.entrypoints.bulk.merging import MERGERS, like_part
from anypool.entrypoints.bulk.progress import PartDone, Progress, check_same_job
from anypool.entrypoints.bulk.report import Bar, Report, peak_memory
from anypool.entrypoints.bulk.sources import Source
from anypool.entrypoints.bulk.storing import Storing
from anypool.entrypoints.bulk.stream import Stream, Work, gather
from anypool.entrypoints.cli_files import WRITERS, atomic_file, json_lines, sync_folder
from anypool.entrypoints.llm import LLM
from anypool.errors import InvalidParameterError
from anypool.pooling.tasks import PoolingTask

# Names with an underscore are left out by what reads a folder of Parquet files as one table.
PROGRESS, _MANIFEST, _ERRORS = "_progress.jsonl", "_manifest.json", "_errors.jsonl"
_RANGES, _LOCK, _MERGED = "_ranges.npy", "_lock", "_merged"
_UNFINISHED = re.compile(r"\..*\.tmp")
_LEFT_OVER = re.compile(r"_progress\.jsonl|_errors-\d+\.jsonl|\..*\.tmp")
_OURS = re.compile(
    r"part-\d+\.\w+|_(errors-\d+|errors|progress)\.jsonl|_manifest\.json|_ranges\.npy|_lock|_merged|\..*\.tmp"
)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go.

    Attributes:
        path: A file with one of the endings of `WRITERS`, or a folder of parts.
        ending: The format of the parts.
        rows_per_part: About how many rows a part has.
        overwrite: Whether what another job left in the folder is removed.
    """

    path: Path
    ending: str
    rows_per_part: int = 10_000
    overwrite: bool = False

    @property
    def is_file(self) -> bool:
        return self.path.suffix == self.ending

    @property
    def folder(self) -> Path:
        """Where the parts are, for a file until it is complete."""
        return self.path.with_name(f"{self.path.name}.parts") if self.is_file else self.path


class Job:
    """One run of texts through a model to the disk.

    Args:
        source: The rows.
        work: What is done with each.
        storing: How vectors are stored.
        output: Where they go.
        engine: What says which model runs them and how, as JSON; another run must have the same to go on.
    """

    def __init__(self, source: Source, work: Work, storing: Storing, output: Output, engine: dict[str, Any]) -> None:
        self.source, self.work, self.storing, self.output = source, work, storing, output
        inputs = source.identity()
        self.is_resumable = inputs is not None
        params = {name: value for name, value in asdict(work.params).items() if value is not None}
        options = {name: value for name, value in asdict(work.options).items() if value is not None}
        ranges_2E = storing.ranges_2E
        self.description = {
            "anypool": anypool.__version__,
            **engine,
            "input": inputs,
            "columns": [getattr(source, "field", "text"), *getattr(source, "keep", ())],
            "task": work.task.value,
            "params": params,
            "prompts": options,
            "precision": storing.precision,
            "calibration": None if ranges_2E is None else ranges_2E.astype(float).sum(axis=1).tolist(),
            "format": output.ending,
        }

    def run(self, load: Callable[[], AbstractContextManager[LLM]], *, show_bar: bool = False) -> Report:
        """Runs what is not done yet.

        Args:
            load: Makes the model; called when all else has been checked, and not where there is nothing left to run.
            show_bar: Whether to show a progress bar.

        Raises:
            InvalidParameterError: The folder has the work of another job, or of nobody that is known.
            AnypoolError: As `Stream.run`. What was done before is kept.
        """
        folder = self.output.folder
        with _locked(folder, keep=not self.output.is_file):
            self._clear(folder)
            if (folder / _MANIFEST).exists():
                finished = json.loads((folder / _MANIFEST).read_bytes())
                check_same_job(folder, finished["job"], self.description)
                _unlink(folder, _LEFT_OVER)
                return Report.of_manifest(finished, self.output.path)
            if not (folder / PROGRESS).exists():
                check_first(self.source, self.work, self.storing)
            progress = Progress(folder / PROGRESS, self.description)
            try:
                return self._run(load, folder, progress, show_bar)
            except BaseException:
                if not progress.parts or not self.is_resumable:
                    _unlink(folder)
                raise

    def _run(
        self, load: Callable[[], AbstractContextManager[LLM]], folder: Path, progress: Progress, show_bar: bool
    ) -> Report:
        if self.storing.needs_ranges and (folder / _RANGES).exists():
            self.storing.ranges_2E = np.load(folder / _RANGES)
        resumed = progress.position.rows
        with load() as llm, Bar(resumed, total=self.source.total(), show=show_bar) as bar:
            began = time.monotonic()
            defaults = llm.engine.loaded.defaults
            size = self.work.params.dimensions or defaults.dimensions or defaults.size.full
            is_dense = self.work.task is PoolingTask.EMBED
            if is_dense and not self.storing.needs_ranges:
                self.storing.store(np.empty((0, size), np.float32))  # says now where the ranges do not fit
            stream = Stream(llm.engine, self.source, self.work)
            parts = gather(
                bar.count(stream.run(progress.position)),
                rows=self.output.rows_per_part,
                may_cut=lambda: not self.storing.needs_ranges,
            )
            with closing(parts):
                for part in parts:
                    self._write(folder, part, progress)
            if not any(part.file for part in progress.parts):
                self._write(folder, self._nothing(is_dense, size, progress.position), progress, even_empty=True)
        report = Report.of_parts(
            progress.parts,
            output=self.output.path,
            resumed=resumed,
            seconds=time.monotonic() - began,
            tokens_now=bar.tokens,
            peak_bytes=peak_memory(),
        )
        self._finish(folder, progress, report)
        return report

    def _clear(self, folder: Path) -> None:
        """Removes what cannot be gone on with: what a kill left unfinished, and where asked for all that is there."""
        names = {path.name for path in folder.iterdir()}
        foreign = sorted(name for name in names if _OURS.fullmatch(name) is None)
        if foreign:
            raise InvalidParameterError(
                f"{folder} holds {foreign[0]!r}, which is no work of anypool embed: give an empty or new folder"
            )
        if self.output.overwrite or not names & {PROGRESS, _MANIFEST}:
            _unlink(folder)
        elif not self.is_resumable:
            Progress(folder / PROGRESS, self.description)
            _unlink(folder)
        else:
            _unlink(folder, _UNFINISHED)

    def _nothing(self, is_dense: bool, size: int, position: Position) -> Done:
        """A part without rows, for the names and types of its columns."""
        kept = list(getattr(self.source, "keep", ()))
        block = self.source.first() if kept else None
        columns: dict[str, Any] = {name: [] if block is None else block.kept[name][:0] for name in kept}
        if is_dense:
            columns["embedding"] = np.empty((0, size), np.float32)
        else:
            columns |= {"indices": [], "values": []}
        return Done(position=position, columns={"index": np.empty(0, np.int64), **columns}, failures=[], tokens=0)

    def _write(self, folder: Path, part: Done, progress: Progress, *, even_empty: bool = False) -> None:
        """Writes a part and what belongs to it, then its line in the log."""
        number = len(progress.parts)
        columns = dict(part.columns)
        has_file = bool(len(part)) or even_empty
        if has_file and "embedding" in columns:
            columns["embedding"] = self.storing.store(columns["embedding"])
            if self.storing.ranges_2E is not None and not (folder / _RANGES).exists():
                with atomic_file(folder / _RANGES) as file:
                    np.save(file, self.storing.ranges_2E)
        if part.failures:
            with atomic_file(folder / f"_errors-{number:05d}.jsonl") as file:
                file.writelines(json_lines(_failure_columns(part)))
        name = f"part-{number:05d}{self.output.ending}" if has_file else None
        if name is not None:
            before = next((folder / one.file for one in progress.parts if one.file), None)
            with atomic_file(folder / name) as file:
                WRITERS[self.output.ending](file, like_part(columns, before))
        progress.add(
            PartDone(file=name, rows=len(part), errors=len(part.failures), tokens=part.tokens, position=part.position)
        )

    def _finish(self, folder: Path, progress: Progress, report: Report) -> None:
        """Puts the parts together, or says beside them that they are all. It can be killed anywhere, and done again."""
        listed = [part for part in progress.parts if part.file]
        errors, path = sorted(folder.glob("_errors-*.jsonl")), self.output.path
        all_errors = path.with_name(f"{path.name}.errors.jsonl") if self.output.is_file else folder / _ERRORS
        all_errors.unlink(missing_ok=True)  # of an earlier run
        if errors:
            with atomic_file(all_errors) as file:
                MERGERS[".jsonl"](file, errors)
        if self.output.is_file:
            with atomic_file(folder / _MERGED) as file:
                MERGERS[self.output.ending](file, [folder / str(part.file) for part in listed])
            (folder / _MERGED).replace(path)
            sync_folder(path.parent)
            (folder / PROGRESS).unlink()  # first: without it the rest counts for nothing
            _unlink(folder)
            return
        with atomic_file(folder / _MANIFEST) as file:
            parts = [{"file": part.file, "rows": part.rows} for part in listed]
            text = json.dumps({"job": self.description, **report.as_json(), "parts": parts}, indent=1)
            file.write(text.encode() + b"\n")
        _unlink(folder, _LEFT_OVER)


def check_first(source: Source, work: Work, storing: Storing) -> None:
    """Reads the first block, so that what is wrong with all rows is found before the model is loaded.

    Raises:
        InvalidRequestError: One of its rows would end the job, or so few rows cannot give ranges.
    """
    block = source.first()
    texts = () if block is None else block.texts
    for text in texts:
        if not isinstance(text, str) and not work.skips_errors:
            raise text
    if block is not None:
        storing.check_enough(len(texts))


def _failure_columns(part: Done) -> dict[str, list[Any]]:
    return {
        "index": [failure.index for failure in part.failures],
        "where": [failure.where for failure in part.failures],
        "error": [type(failure.error).__name__ for failure in part.failures],
        "message": [str(failure.error) for failure in part.failures],
    }


def _unlink(folder: Path, names: re.Pattern[str] = _OURS) -> None:
    for path in folder.iterdir():
        if names.fullmatch(path.name) and path.name != _LOCK:
            path.unlink()


@contextmanager
def _locked(folder: Path, *, keep: bool) -> Iterator[None]:
    """Makes a folder, and keeps other processes from it. One that is empty afterwards goes, unless it was there."""
    was_there = folder.is_dir()
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidParameterError(f"{folder}: another process is writing to it") from None
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)  # before it is let go: nobody's but ours
        lock.release()
        if not any(folder.iterdir()) and not (keep and was_there):
            folder.rmdir()

"""What a job has done: a log beside its parts, a line per part, which survives a kill at any moment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anypool.entrypoints.bulk.blocks import Position
from anypool.entrypoints.cli_files import atomic_file
from anypool.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class PartDone:
    """A part that is on the disk.

    Attributes:
        file: Its name; None where none of its rows had a result.
        rows: How many it has.
        errors: How many rows had none.
        tokens: How many were run for it.
        position: How far the input had been read after it.
    """

    file: str | None
    rows: int
    errors: int
    tokens: int
    position: Position


class Progress:
    """The log of one job. A part counts once its line is complete: what a kill left beside that is done again.

    Args:
        path: The log.
        job: What the job is, as JSON: a log of another one is an error.

    Raises:
        InvalidParameterError: The log is of another job; the message says in what they differ.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path = path
        self.parts: list[PartDone] = []
        if not path.exists():
            with atomic_file(path) as file:
                file.write(_line({"job": job}))
            return
        complete = path.read_bytes()
        complete = complete[: complete.rfind(b"\n") + 1]
        os.truncate(path, len(complete))
        first, *others = map(json.loads, complete.splitlines())
        check_same_job(path.parent, first["job"], job)
        for line in others:
            self.parts.append(PartDone(**{**line, "position": Position(*line["position"])}))

    @property
    def position(self) -> Position:
        """How far the input has been read."""
        return self.parts[-1].position if self.parts else Position()

    def add(self, part: PartDone) -> None:
        """Notes a part, whose files are on the disk."""
        with self.path.open("ab") as file:
            file.write(_line(vars(part)))
            file.flush()
            os.fsync(file.fileno())
        self.parts.append(part)


def rows_read(path: Path) -> int:
    """How many rows of its input the job of a log has got through; none where there is no log."""
    lines = path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")]
    return Position(*json.loads(complete[-1])["position"]).rows if complete else 0


def check_same_job(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to go on with another job."""
    now = json.loads(json.dumps(now))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = "; ".join(f"{name}: {_short(before.get(name))} before, {_short(now.get(name))} now" for name in names)
        raise InvalidParameterError(
            f"{folder} has the work of another job ({changes}): give its flags to go on with it, --overwrite to begin "
            "anew, or another --output"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"

"""How a bulk job goes: a progress bar while it runs, and a line at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from anypool.entrypoints.bulk.blocks import Done
from anypool.entrypoints.bulk.progress import PartDone


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a job did.

    Attributes:
        rows: Rows with a result, those of earlier runs included.
        errors: Rows without one.
        tokens: How many were run for all of them.
        resumed: Rows that earlier runs had read.
        seconds: What this run took, without loading the model.
        tokens_now: How many of the tokens this run ran.
        peak_bytes: The most memory that the process had; None where the system does not say.
        output: The file or folder.
        was_complete: Whether there was nothing left to do.
    """

    rows: int
    errors: int
    tokens: int
    output: Path
    resumed: int = 0
    seconds: float = 0.0
    tokens_now: int = 0
    peak_bytes: int | None = None
    was_complete: bool = False

    @classmethod
    def of_parts(cls, parts: Sequence[PartDone], **rest: Any) -> Report:
        rows, errors, tokens = (sum(getattr(part, name) for part in parts) for name in ("rows", "errors", "tokens"))
        return cls(rows=rows, errors=errors, tokens=tokens, **rest)

    @classmethod
    def of_manifest(cls, manifest: dict[str, Any], output: Path) -> Report:
        counts = {name: manifest[name] for name in ("rows", "errors", "tokens")}
        return cls(**counts, output=output, was_complete=True)

    def as_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "errors": self.errors, "tokens": self.tokens}

    def __str__(self) -> str:
        errors = f", {self.errors:,} without a result" if self.errors else ""
        if self.was_complete:
            return f"{self.output} is complete: {self.rows:,} rows{errors}"
        now, seconds = self.rows + self.errors - self.resumed, max(self.seconds, 1e-9)
        text = f"{self.output}: {self.rows:,} rows{errors}"
        if self.resumed:
            text += f"; {self.resumed:,} were there, and {now:,} were run now"
        text += f"; {self.tokens_now:,} tokens in {self.seconds:,.1f} s"
        text += f" ({now / seconds:,.0f} rows/s, {self.tokens_now / seconds:,.0f} tokens/s)"
        return text if self.peak_bytes is None else f"{text}; peak memory {self.peak_bytes / 1e6:,.0f} MB"


class Bar:
    """A progress bar with rows and tokens per second.

    Args:
        rows: Rows that are done already.
        total: How many there are; None where that is not known.
        show: Whether there is one.
    """

    def __init__(self, rows: int, *, total: int | None, show: bool) -> None:
        self.tokens = 0
        self._began = time.monotonic()
        self._bar = tqdm(
            total=total, initial=rows, desc="embed", unit="row", unit_scale=True, disable=not show, file=sys.stderr
        )

    def count(self, blocks: Iterator[Done]) -> Iterator[Done]:
        """The blocks as they are, counted."""
        for block in blocks:
            self.tokens += block.tokens
            per_s = self.tokens / max(time.monotonic() - self._began, 1e-9)
            self._bar.set_postfix_str(f"{per_s:,.0f} tokens/s", refresh=False)
            self._bar.update(len(block) + len(block.failures))
            yield block

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def peak_memory() -> int | None:
    """The most memory that this process has had, in bytes; None where the system does not say."""
    try:  # Linux: what the system's own call says begins with the size of the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    except OSError:
        pass
    try:
        import resource  # of POSIX systems
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

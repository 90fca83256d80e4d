"""Tries each architecture in a process of its own, so that one that hangs or crashes costs nothing else."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from tests.breadth.architectures import Case, cases
from tests.breadth.check import check

CPU_SECONDS = 60  # of a case; seconds of the clock say nothing on a busy machine

Results = dict[tuple[str, str], dict[str, Any]]


def read(path: Path) -> Results:
    """The last result of each task and architecture, in a file of one JSON object per line."""
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {(result["task"], result["architecture"]): result for result in results}


def run(path: Path, *, names: Collection[str] = (), again: Collection[str] = ()) -> Results:
    """Tries what is not in a file yet, adds each result to it as it comes, and returns all.

    Args:
        path: The file.
        names: Tasks, model types or architectures to try; empty for all.
        again: Outcomes that are tried once more.
    """
    torch.set_num_threads(1)
    known = read(path)
    for case in cases():
        before = known.get((case.task, case.architecture))
        is_wanted = not names or not {case.task, case.model_type, case.architecture}.isdisjoint(names)
        if is_wanted and (before is None or before["outcome"] in again):
            result = known[case.task, case.architecture] = _apart(case)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{case.task:14} {case.architecture:45} {result['outcome']:13} {result['why']}", flush=True)
    return known


def _apart(case: Case) -> dict[str, Any]:
    """The result of a case, whatever happens to the process that finds it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        with os.fdopen(writer, "w") as out:
            json.dump(check(case), out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        result: dict[str, Any] = json.loads(text)
        return result
    why = f"the process ended with {os.waitstatus_to_exitcode(status)} after at most {CPU_SECONDS} s"
    return {**case._asdict(), "outcome": "failed", "why": why}

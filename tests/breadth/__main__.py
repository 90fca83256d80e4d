"""Tries architectures, each in a process of its own, and keeps what came of them.

    python -m tests.breadth [--results FILE] [--again OUTCOME ...] [NAME ...]

Results are added to a file of one JSON object per line as they come, and what is there already is not tried again,
unless it is named or its outcome is. NAME is an architecture, a model type or a task.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.breadth.architectures import Case, cases
from tests.breadth.check import check

CPU_SECONDS = 60  # of a case; seconds of the clock say nothing on a busy machine


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each architecture and task."""
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {(result["task"], result["architecture"]): result for result in results}


def run_apart(case: Case) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("/tmp/breadth.jsonl"))
    parser.add_argument("--again", nargs="*", default=[], metavar="OUTCOME")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = read(arguments.results)
    for case in cases():
        before = known.get((case.task, case.architecture))
        if arguments.names and not {case.task, case.model_type, case.architecture} & set(arguments.names):
            continue
        if before is not None and not arguments.names and before["outcome"] not in arguments.again:
            continue
        began = time.perf_counter()
        result = run_apart(case)
        with arguments.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        seconds = time.perf_counter() - began
        print(
            f"{case.task:14} {case.architecture:45} {result['outcome']:13} {seconds:5.1f} s  {result['why']}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

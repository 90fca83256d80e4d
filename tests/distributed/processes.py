"""Runs a function in several processes that are each other's ranks, and sees to it that none of them is left."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anypool.model_executor import distributed


def in_processes(
    work: Callable[..., Any], *args: Any, tp_size: int = 1, pp_size: int = 1, timeout_s: float = 240.0
) -> list[Any]:
    """What `work(*args)` returns on each rank, in their order.

    The function is imported by name in new processes, so its module should import little.

    Raises:
        AssertionError: It raised on a rank, or did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="anypool-ranks-") as name:
        folder = Path(name)
        sizes = tp_size, pp_size
        processes = [
            context.Process(target=_run, args=(rank, sizes, folder, work, args), daemon=True)
            for rank in range(tp_size * pp_size)
        ]
        for process in processes:
            process.start()
        try:
            end = time.monotonic() + timeout_s
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            failures = [path.read_text() for path in sorted(folder.glob("*.txt"))]
            assert not failures, "\n".join(failures)
            codes = [process.exitcode for process in processes]
            assert codes == [0] * len(processes), f"exit codes {codes} after {timeout_s:g} s"
            return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(processes))]
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()


def _run(rank: int, sizes: tuple[int, int], folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        distributed.start(rank, tp_size=sizes[0], pp_size=sizes[1], address=f"file://{folder}/store", timeout_s=120)
        result = work(*args)
        distributed.stop()
        torch.save(result, folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise

"""What a process sets up once before it computes on the CPU: threads and memory."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_CGROUPS = Path("/sys/fs/cgroup")
# Seconds that a thread gets to notice that it is to end.
_END_S = 5.0
# Seconds after which memory that is kept for the next layer is given back once.
_KEPT_MEMORY_S = 5.0


def set_up_threads(*, root: Path = _CGROUPS) -> None:
    """Lowers torch's number of threads to what the cgroup allows; torch itself follows only the CPU affinity.

    `OMP_NUM_THREADS` and an earlier `torch.set_num_threads` with fewer are left as they are.
    """
    allowed = cgroup_cpus(root)
    if allowed is not None and "OMP_NUM_THREADS" not in os.environ and allowed < torch.get_num_threads():
        torch.set_num_threads(allowed)


def run_apart(function: Callable[[], T], *, unless: Future[Any] | None = None) -> T:
    """Calls a function in a thread that ends with it, and returns or raises what it does.

    Each thread that computes with torch gets a team of OpenMP threads of its own, which lasts as long as it does.
    While the teams together have more threads than there are CPUs, GNU's OpenMP lets them fall asleep at once, and
    waking one costs 50 microseconds in every operation: lone texts took half as long again. So only the thread that
    runs the model should have a team. It also leaves modes that torch keeps per thread, such as a default device, to
    the caller.

    What a signal raises in the caller meanwhile, such as a KeyboardInterrupt, ends the function too.

    Args:
        function: What is called.
        unless: Where this ends first, the function is ended, and what it raises is raised.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # the caller's to see
            outcome.set_exception(error)

    thread = threading.Thread(target=call, name="anypool-apart", daemon=True)
    try:
        thread.start()
        wait([outcome, *([] if unless is None else [unless])], return_when=FIRST_COMPLETED)
        if unless is not None and not outcome.done():
            unless.result()
            raise RuntimeError("what a function was to run without has come to be")
    except BaseException:
        _end(thread, outcome)
        raise
    thread.join()
    try:
        return outcome.result()
    finally:
        outcome = Future()  # an error knows this call, which would know the error: what the function held would stay


def _end(thread: threading.Thread, outcome: Future[T]) -> None:
    """Has a thread end at its next step of Python. If it ran on, it would crash the interpreter at its end, in torch.

    A second interrupt, or one that the thread does not notice for seconds, in a download perhaps, waits no longer.
    """
    if thread.ident is not None:  # it has started
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        # Until Python 3.13 an interrupted `join` took its thread for ended, so what waits is not that.
        if wait([outcome], _END_S).done:
            thread.join()


def cgroup_cpus(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many CPUs the process's cgroup may use, a part of one counting as one; None for no limit."""
    folders = [root, root / "cpu"]  # inside a container, cgroup version 2 and 1
    paths = [line.split(":", 2)[2] for line in _read(own).splitlines() if line.count(":") >= 2]
    for path in paths:
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    limits = [limit for limit in map(_cpus, folders) if limit is not None]
    return max(1, math.ceil(min(limits))) if limits else None


def _cpus(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or not int(fields[1]):
        return None  # "max", or -1
    return int(fields[0]) / int(fields[1])


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@cache
def keep_freed_memory() -> bool:
    """Has glibc keep freed memory for the next allocation instead of giving it back to the system.

    Hidden states of one layer are freed and allocated again in the next, and every page that comes back from the system
    costs a fault. One arena for all threads, since the heaps of the others are given back whatever the threshold.
    Called after loading, when what was freed has been given back. `MALLOC_...` and `GLIBC_TUNABLES` in the environment
    win.

    Returns:
        Whether it did.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    thresholds = libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    return bool(thresholds and libc.mallopt(_M_ARENA_MAX, 1))


class KeptMemory:
    """Freed memory that is kept for the next layer, and given back once in a while, which takes about 20 ms.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_kept = device.type == "cpu" and keep_freed_memory()
        self._trimmed = time.monotonic()

    def trim(self) -> None:
        """Gives it back if it is time."""
        now = time.monotonic()
        if self._is_kept and now - self._trimmed >= _KEPT_MEMORY_S:
            self._trimmed = now
            give_freed_memory_back()


def give_freed_memory_back() -> None:
    """Gives the system what glibc keeps: batches of ever other sizes leave ever more of it between what is in use."""
    ctypes.CDLL(None).malloc_trim(0)

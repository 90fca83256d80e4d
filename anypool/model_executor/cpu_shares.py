"""Which CPUs each of several engines on one machine gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anypool.model_executor.cpu import cgroup_cpus

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """What one engine gets.

    Attributes:
        cpus: Where it may run; empty for anywhere, on systems that do not pin processes.
        threads: How many threads it computes with.
    """

    cpus: tuple[int, ...]
    threads: int


def share_cpus(count: int, *, system: Path = _SYSTEM, quota: int | None = None) -> list[CpuShare]:
    """Divides the CPUs of this process's affinity among `count` engines.

    Neighbours go together: the hardware threads of a core are never divided while there is a core for each engine, and
    a share lies in one NUMA node where the numbers allow it. Where there are fewer CPUs than engines, some have one in
    common.

    Args:
        count: How many engines.
        system: Where Linux describes its CPUs.
        quota: CPUs' worth of time that the process may use; by default what its cgroup says. Shares are pinned all the
            same, but compute with no more threads together.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [CpuShare(cpus=(), threads=max(1, (os.cpu_count() or 1) // count)) for _ in range(count)]
    cores = _cores(os.sched_getaffinity(0), system)
    if len(cores) < count:
        cores = [[cpu] for core in cores for cpu in core]
    total = len(cores)
    shares = [cores[i * total // count : (i + 1) * total // count] or [cores[i % total]] for i in range(count)]
    quota = cgroup_cpus() if quota is None else quota
    most = len([cpu for core in cores for cpu in core]) if quota is None else max(1, quota // count)
    return [CpuShare(cpus=cpus, threads=min(most, len(cpus))) for cpus in map(_flat, shares)]


def computes_on_all_cores(*, system: Path = _SYSTEM) -> bool:
    """Whether torch's threads, as many as the calling thread may use, leave no core to others."""
    if not hasattr(os, "sched_getaffinity"):
        return torch.get_num_threads() >= (os.cpu_count() or 1)
    cores, quota = len(_cores(os.sched_getaffinity(0), system)), cgroup_cpus()
    return torch.get_num_threads() >= (cores if quota is None else min(cores, quota))


def _flat(cores: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def _cores(cpus: Iterable[int], system: Path) -> list[list[int]]:
    """CPUs by core, cores of a NUMA node and of a cache side by side."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(cpus):
        folder = system / "cpu" / f"cpu{cpu}"
        node = min((int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")), default=0)
        cache = _first(folder / "cache" / "index3" / "shared_cpu_list", 0)
        core = _first(folder / "topology" / "thread_siblings_list", cpu)
        found.setdefault((node, cache, core), []).append(cpu)
    return [found[key] for key in sorted(found)]


def _first(file: Path, default: int) -> int:
    """The first number of a list such as "0-3,8"."""
    try:
        return int(file.read_text().replace(",", "-").partition("-")[0])
    except (OSError, ValueError):
        return default

"""Threads follow the cgroup, and freed memory is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anypool.model_executor.cpu import cgroup_cpus, set_up_threads


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "800000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        ({"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_the_lowest_limit_of_the_cgroup_and_those_around_it_counts(
    files: dict[str, str], cpus: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert cgroup_cpus(tmp_path, own) == cpus


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("3", 3)])
def test_threads_are_lowered_unless_the_environment_says_how_many(
    variable: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        set_up_threads(root=tmp_path)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


_PAGE_FAULTS = """
import resource, torch
from anypool.model_executor.cpu import keep_freed_memory
kept = keep_freed_memory()
for turn in range(14):
    if turn == 4:  # small pieces are cut off a block that was freed, so there are several in the end
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    printed = subprocess.run(
        [sys.executable, "-c", _PAGE_FAULTS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    kept, faults = printed.split()
    if kept != "True":
        pytest.skip("another C library")
    assert int(faults) < 2 * 16_384  # of ten times 16,384 pages

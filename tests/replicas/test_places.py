"""Which CPUs and GPUs replicas get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from anypool.config import EngineConfig
from anypool.engine.replicas.places import places
from anypool.errors import ConfigError
from anypool.model_executor.cpu_shares import share_cpus


def machine(root: Path, *, nodes: int, cores: int, threads: int) -> Path:
    """A description as Linux has it: CPU n + cores * nodes is the second hardware thread of CPU n."""
    total = nodes * cores
    for cpu in range(total * threads):
        core = cpu % total
        folder = root / "cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{core // cores}").mkdir()
        siblings = ",".join(str(core + total * thread) for thread in range(threads))
        (folder / "topology" / "thread_siblings_list").write_text(siblings)
    return root


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    cpus: set[int] = set()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    return cpus


def shares(count: int, system: Path, quota: int = 10**6) -> list[tuple[int, ...]]:
    return [share.cpus for share in share_cpus(count, system=system, quota=quota)]


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= set(range(8))
    system = machine(tmp_path, nodes=1, cores=4, threads=2)
    assert shares(2, system) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert shares(4, system) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert shares(3, system) == [(0, 4), (1, 5), (2, 3, 6, 7)]


def test_numa_nodes_are_not_mixed(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= set(range(16))
    system = machine(tmp_path, nodes=2, cores=4, threads=2)
    assert shares(2, system) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]


def test_only_allowed_cpus_are_shared_out(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= {1, 3, 6}
    assert shares(3, machine(tmp_path, nodes=1, cores=8, threads=1)) == [(1,), (3,), (6,)]


def test_more_engines_than_cores_take_hardware_threads_and_then_share(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= set(range(4))
    system = machine(tmp_path, nodes=1, cores=2, threads=2)
    assert shares(4, system) == [(0,), (2,), (1,), (3,)]
    assert len(shares(6, system)) == 6
    assert all(len(cpus) == 1 for cpus in shares(6, system))


def test_a_quota_limits_threads_and_not_where_they_run(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= set(range(8))
    found = share_cpus(2, system=machine(tmp_path, nodes=1, cores=8, threads=1), quota=4)
    assert [(len(share.cpus), share.threads) for share in found] == [(4, 2), (4, 2)]


def test_without_descriptions_every_cpu_is_a_core(tmp_path: Path, affinity: set[int]) -> None:
    affinity |= set(range(4))
    assert shares(2, tmp_path) == [(0, 1), (2, 3)]


# GPUs.


def config(**settings: object) -> EngineConfig:
    return EngineConfig(model="m", **{"data_parallel_size": 2, **settings})  # type: ignore[arg-type]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.usefixtures("four_gpus")
def test_each_replica_sees_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.environment for one in places(config())] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-3a,1")
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in places(config(), gpus_each=2)] == ["7,5", "GPU-3a,1"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert places(config())[1].environment == {"HIP_VISIBLE_DEVICES": "1"}
    assert all(not one.cpus and one.memory_share == 1 for one in places(config()))


@pytest.mark.usefixtures("four_gpus")
def test_too_few_gpus_and_named_ones_are_errors() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=5: replicas of 1 GPU need 5, and torch sees 4 here"):
        places(config(data_parallel_size=5))
    with pytest.raises(ConfigError, match="device='cuda:1': replicas take a GPU each"):
        places(config(device="cuda:1"))


def test_gpus_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        places(config(device="cuda"))


def test_more_replicas_than_cpus_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    count = len(os.sched_getaffinity(0)) + 1
    assert len(places(config(device="cpu", data_parallel_size=count))) == count
    assert "there are fewer CPUs" in caplog.text

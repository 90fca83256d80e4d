"""What all tests share: nothing is downloaded, and what needs a GPU is skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers of pytest-xdist share the machine: threads of torch that wait for each other's CPU cost a multiple.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

import torch  # noqa: E402 - reads the variable when it is imported

NETWORK = os.environ.get("ANYPOOL_NETWORK_TESTS") == "1"
if not NETWORK:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
        if item.get_closest_marker("breadth") and os.environ.get("ANYPOOL_BREADTH_TESTS") != "1":
            item.add_marker(pytest.mark.skip(reason="set ANYPOOL_BREADTH_TESTS=1 to try every architecture"))
        if item.get_closest_marker("network") and not NETWORK:
            item.add_marker(pytest.mark.skip(reason="set ANYPOOL_NETWORK_TESTS=1 to download"))


@pytest.fixture(scope="module", autouse=True)
def _registries() -> Iterator[None]:
    """Classes that the tests of a file register are forgotten: other processes could not import local ones."""
    from anypool.model_executor.registry import ModelRegistry

    before = dict(ModelRegistry._own)
    yield
    ModelRegistry._own = before


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture
def interpreter() -> None:
    """For tests that run kernels on a CPU. Where there is a GPU the interpreter is off, and tests/gpu has them."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off where there is a GPU")

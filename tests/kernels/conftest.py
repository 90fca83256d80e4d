"""Kernels run on a GPU where there is one, and through Triton's interpreter on a CPU elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

LENGTHS = (7, 0, 63, 1, 130, 1000, 0)
# numpy's words, through the interpreter, where a maximum passes over NaN.
ALL_NAN = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Operations run as kernels, on memory that is full of NaN before they write it."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def full_of_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return full_of_nan


def bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`cu_seqlens`."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device, in a tensor that is not contiguous."""
    wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=torch.Generator().manual_seed(seed))
    return wide.to(device, dtype)[..., 1:-2]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, within: float = 2e-6) -> None:
    """Equal but for rounding of the dtype, or for `within` in float32; NaN equals NaN."""
    rounding = {torch.float32: within, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=rounding, rtol=rounding, equal_nan=True)

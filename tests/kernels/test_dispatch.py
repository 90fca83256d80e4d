"""Which form an operation takes."""

from __future__ import annotations

import pytest
import torch

from anypool.errors import ConfigError
from anypool.kernels import dispatch

ON_CPU = torch.empty(1)


class OnGPU:
    """A tensor's device, where there is no GPU to have a tensor on."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("way", "x", "installed", "kernel"),
    [
        ("auto", ON_CPU, True, False),
        ("auto", OnGPU(), True, True),
        ("auto", OnGPU(), False, False),
        ("torch", OnGPU(), True, False),
        ("triton", OnGPU(), True, True),
        ("triton", ON_CPU, True, True),
    ],
)
def test_kernels_run_on_gpus_and_where_they_are_asked_for(
    way: str, x: torch.Tensor, installed: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYPOOL_KERNELS", way)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "has_triton", lambda: installed)
    assert dispatch.uses_triton(x) is kernel


def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYPOOL_KERNELS", "cuda")
    with pytest.raises(ConfigError, match=r"ANYPOOL_KERNELS='cuda' is unknown; known: auto, torch, triton"):
        dispatch.uses_triton(ON_CPU)
    monkeypatch.setenv("ANYPOOL_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a GPU, or TRITON_INTERPRET=1"):
        dispatch.uses_triton(ON_CPU)

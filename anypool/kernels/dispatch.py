"""Which of its two forms an operation takes: plain torch, or the Triton kernel."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from anypool.errors import ConfigError

KERNELS = "ANYPOOL_KERNELS"


def uses_triton(x: torch.Tensor) -> bool:
    """Whether an operation on this tensor runs as a Triton kernel.

    `ANYPOOL_KERNELS` says so: "auto" is yes on a GPU where Triton is installed, "torch" is never. "triton" is always,
    on a CPU through Triton's interpreter, which is slow and needs `TRITON_INTERPRET=1`: it is for tests.
    """
    way = os.environ.get(KERNELS, "auto")
    if way == "auto":
        return x.device.type == "cuda" and has_triton()
    if way not in ("torch", "triton"):
        raise ConfigError(f"{KERNELS}={way!r} is unknown; known: auto, torch, triton")
    if way == "triton" and x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"{KERNELS}=triton needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter on a CPU")
    return way == "triton"


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def with_plain_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose last dimension lies element by element: what the kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()

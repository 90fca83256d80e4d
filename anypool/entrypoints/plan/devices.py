"""How fast devices are at most: published peaks of GPUs, and this machine's CPU as it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from anypool.engine.pieces import device_memory
from anypool.entrypoints.bench.ceiling import measure_ceiling
from anypool.errors import InvalidParameterError
from anypool.model_executor.cpu import set_up_threads
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.packing import pack_linears

Range = tuple[float, float]

_TERA, _GIB = 1e12, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: As `--gpu` has it, or "cpu".
        memory: Bytes.
        flops: FLOP/s of its products of matrices by dtype, without sparsity.
        bandwidth: Bytes per second that it reads from its memory; None where nobody measured it.
        source: Where these come from.
        share: The lowest and the highest share of `flops` that whole models are taken to reach.
        share_source: Where that comes from.
    """

    name: str
    memory: int
    flops: Mapping[torch.dtype, float]
    bandwidth: float | None
    source: str
    share: Range
    share_source: str


_ASSUMED: Range = (0.3, 0.5)
_ASSUMED_SOURCE = "assumed, not measured: --share takes what your card reaches"


def _gpu(name: str, *, memory: int, half: float, single: float, bandwidth: float, source: str) -> Device:
    return Device(
        name=name,
        memory=memory * _GIB,
        flops={torch.bfloat16: half * _TERA, torch.float16: half * _TERA, torch.float32: single * _TERA},
        bandwidth=bandwidth * _TERA,
        source=source,
        share=_ASSUMED,
        share_source=_ASSUMED_SOURCE,
    )


# GiB, dense TFLOP/s in bfloat16 and float32, TB/s, as the makers' data sheets have them; docs/scaling.md links them.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", memory=180, half=2250, single=75, bandwidth=7.7, source="NVIDIA HGX B200 data sheet"),
        _gpu("h200", memory=141, half=989, single=67, bandwidth=4.8, source="NVIDIA H200 SXM data sheet"),
        _gpu("h100", memory=80, half=989, single=67, bandwidth=3.35, source="NVIDIA H100 SXM data sheet"),
        _gpu("h100-pcie", memory=80, half=756, single=51, bandwidth=2.0, source="NVIDIA H100 PCIe data sheet"),
        _gpu("a100-80gb", memory=80, half=312, single=19.5, bandwidth=2.039, source="NVIDIA A100 SXM data sheet"),
        _gpu("a100-40gb", memory=40, half=312, single=19.5, bandwidth=1.555, source="NVIDIA A100 data sheet"),
        _gpu("l40s", memory=48, half=362, single=91.6, bandwidth=0.864, source="NVIDIA L40S data sheet"),
        _gpu("l4", memory=24, half=121, single=30.3, bandwidth=0.3, source="NVIDIA L4 data sheet"),
        _gpu("a10", memory=24, half=125, single=31.2, bandwidth=0.6, source="NVIDIA A10 data sheet"),
        _gpu("mi300x", memory=192, half=1307, single=163.4, bandwidth=5.3, source="AMD MI300X data sheet"),
    )
}


def find_gpu(name: str) -> Device:
    """The GPU of a name.

    Raises:
        InvalidParameterError: It is not in the table.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise InvalidParameterError(f"gpu={name!r} is unknown; known: {', '.join(GPUS)}", param="gpu")
    return gpu


def this_cpu(dtype: torch.dtype) -> Device:
    """This machine's CPU: its fastest product of matrices is measured now, which takes a second or two."""
    set_up_threads()
    linear = Linear(64, 64).to(dtype)
    pack_linears(linear)
    has_amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return Device(
        name="cpu",
        memory=device_memory(torch.device("cpu")),
        flops={dtype: measure_ceiling(linear)},
        bandwidth=None,
        source="measured on this machine now: its fastest product of large matrices",
        share=(0.17, 0.2) if has_amx else (0.6, 0.73),
        share_source="measured with MiniLM on a Xeon with AMX, docs/performance.md"
        if has_amx
        else "measured with MiniLM and Gemma-3-270M on an AMD EPYC 9004, docs/performance.md",
    )

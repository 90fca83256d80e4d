"""Compiles every kernel for GPUs that need not be there: `python -m tests.kernels.build`, which prints JSON.

The launchers run on CPU tensors with a recorder in the kernel's place, so what is compiled is what they launch.
Triton's interpreter must be off: it is chosen when a kernel is defined.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BINARIES = {"cuda": "cubin", "hip": "hsaco"}

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16

Launch = dict[str, Any]


class Recorder:
    """Stands in a kernel's place and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self.launches.append({**dict(zip(self.kernel.arg_names, args, strict=False)), **named})

        return launch


@contextmanager
def recorded(op: str) -> Iterator[tuple[Any, Recorder]]:
    """The Triton module of an operation, its kernel replaced."""
    module = importlib.import_module(f"anypool.kernels.{op}.triton")
    [name] = [name for name in vars(module) if name.endswith("_kernel")]
    recorder = Recorder(getattr(module, name))
    with mock.patch.object(module, name, recorder):
        yield module, recorder


def compile_launch(kernel: Any, launch: Launch, target: GPUTarget) -> Any:
    """What `triton.compile` makes of a launch."""
    constants = {param.name for param in kernel.params if param.is_constexpr}
    signature, constexprs, attrs = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = launch[name]
        if name in constants or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attrs[(place,)] = _POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:  # as a launch does it, which also counts on multiples of 16
            signature[name], constexprs[name] = "constexpr", 1
        else:
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0:
                attrs[(place,)] = [["tt.divisibility", 16]]
    # The interpreter's way around is not what a GPU runs.
    constexprs.update({name: False for name in ("UPCAST",) if name in constexprs})
    source = ASTSource(kernel, signature, constexprs, attrs)
    options = {name: launch[name] for name in _OPTIONS if name in launch}
    return triton.compile(source, target=target, options={**options, "enable_fp_fusion": True})


def launches() -> Iterator[tuple[str, Any, Launch]]:
    """One launch of each kind that an operation has: name, kernel, arguments."""
    for op, calls in CALLS.items():
        with recorded(op) as (module, recorder):
            for call in calls:
                call(module)
            for number, launch in enumerate(recorder.launches):
                yield f"{op}[{number}]", recorder.kernel, launch


def _attention(
    size: int, dtype: torch.dtype, *, prefix: bool = False, longest: int = 300, **options: Any
) -> Callable[[Any], None]:
    def call(module: Any) -> None:
        q, kv = torch.empty(300, 8, size, dtype=dtype), torch.empty(300, 2, size, dtype=dtype)
        paged = None
        if prefix:
            table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            paged = module.PagedKeys(torch.empty(64, 2, size, dtype=dtype), kv[:64], table, lengths, 16)
        settings = {"window": (-1, -1), "softcap": None, "sinks_H": None, **options}
        module.varlen_attention(q, kv, kv, _cu(), longest, scale=0.1, prefix=paged, **settings)

    return call


def _cu() -> torch.Tensor:
    return torch.tensor([0, 100, 300], dtype=torch.int32)


def _pool(method: str, size: int, rows: torch.dtype, **options: Any) -> Callable[[Any], None]:
    settings = {"skips_N": None, "normalize": False, "dimensions": size, "dtype": _F32, **options}
    return lambda m: m.segment_pool(torch.empty(300, size, dtype=rows), _cu(), method, **settings)


def _tokens(size: int, dtype: torch.dtype, finish: str, index: torch.Tensor | None) -> Callable[[Any], None]:
    return lambda m: m.token_pool(
        torch.empty(300, size, dtype=dtype), index, dimensions=size, finish=finish, dtype=_F32
    )


def _scores(labels: int, activation: str, index: torch.Tensor | None) -> Callable[[Any], None]:
    weight_CD = torch.empty(labels, 1024)
    return lambda m: m.score_head(
        torch.empty(300, 1024, dtype=_BF16),
        weight_CD,
        weight_CD[:, 0],
        index,
        mean=0.0,
        sigma=1.0,
        activation=activation,
    )


def _lora(
    size: int, outputs: int, rank: int, dtype: torch.dtype, *, slots: int = 4, offset: int = 0
) -> Callable[[Any], None]:
    def call(module: Any) -> None:
        lora = module.LoRAStack(slots, rank, size, outputs, dtype=dtype, device="cpu")
        y_TO = torch.empty(300, outputs + 2 * offset, dtype=dtype)[:, offset : offset + outputs]
        module.segmented_lora(y_TO, torch.empty(300, size, dtype=dtype), lora, torch.zeros(300, dtype=torch.int32))

    return call


_INDEX = torch.zeros(7, dtype=torch.int64)
_SKIPS = torch.zeros(2, dtype=torch.int32)

CALLS: dict[str, list[Callable[[Any], None]]] = {
    "segment_pool": [
        _pool("MEAN", 768, _BF16, normalize=True),
        _pool("LAST", 4096, _BF16, normalize=True, dtype=_BF16),
        _pool("MAX", 1024, _F16, skips_N=_SKIPS),
        _pool("WEIGHTED_MEAN", 384, _F32, skips_N=_SKIPS),
        _pool("CLS", 1, _F32, skips_N=_SKIPS),
        _pool("MEAN_SQRT_LEN", 33, _F16, skips_N=_SKIPS),
    ],
    "token_pool": [
        _tokens(128, _BF16, "normalize", None),
        _tokens(4096, _F16, "normalize", _INDEX),
        _tokens(9, _F32, "softmax", None),
    ],
    "score_head": [_scores(1, "sigmoid", _INDEX), _scores(3, "softmax", None), _scores(32, "gelu", None)],
    "varlen_attention": [
        _attention(32, _BF16),
        _attention(128, _BF16, longest=16),
        _attention(64, _F16, window=(-1, 0)),
        _attention(128, _BF16, window=(4095, 0), sinks_H=torch.empty(8)),
        _attention(128, _BF16, window=(-1, 0), prefix=True),
        _attention(256, _BF16, window=(-1, 0), softcap=50.0),
        _attention(256, _BF16, window=(511, 0), softcap=50.0, prefix=True),
        _attention(64, _F32, window=(64, 64)),
        _attention(256, _F32, window=(-1, 0)),
        _attention(8, _BF16, longest=1),
        _attention(128, _BF16, longest=7, window=(-1, 0), prefix=True),
        _attention(256, _F16, longest=20, softcap=50.0),
    ],
    "maxsim": [
        lambda m: m.maxsim_pairs(
            torch.empty(300, 1, dtype=_BF16), _cu(), torch.empty(300, 1, dtype=_F16), _cu(), torch.zeros(1, 2).long()
        ),
        lambda m: m.maxsim_pairs(torch.empty(300, 128), _cu(), torch.empty(300, 128), _cu(), torch.zeros(3, 2).long())
    ],
    "rms_norm": [
        lambda m: m.rms_norm(
            torch.empty(9, 4096, dtype=_BF16), torch.empty(4096, dtype=_BF16), eps=1e-6, unit_offset=True,
            residual=torch.empty(9, 4096, dtype=_BF16),
        ),
        lambda m: m.rms_norm(torch.empty(9, 8, 128), torch.empty(128), eps=1e-6, unit_offset=False, residual=None),
    ],
    "rotary": [
        lambda m: m.apply_rotary(
            torch.empty(9, 8, 128, dtype=_BF16), torch.empty(9, 1, 64, dtype=_BF16), torch.empty(9, 1, 64, dtype=_BF16)
        )
    ],
    "gated": [
        lambda m: m.gated(torch.empty(9, 512, dtype=_BF16), "gelu_tanh"),
        lambda m: m.gated(torch.empty(9, 512, dtype=_F16), "gelu"),
        lambda m: m.gated(torch.empty(1, 2, dtype=_F32), "silu"),
        lambda m: m.gated(torch.empty(9, 66, dtype=_F32), "relu"),
    ],
    "segmented_lora": [
        _lora(4096, 1024, 16, _BF16, offset=1024),
        _lora(12288, 4096, 64, _BF16),
        _lora(1024, 4096, 256, _F16),
        _lora(384, 384, 8, _F32),
        _lora(33, 1, 1, _F32, slots=1, offset=1),
        _lora(1, 33, 3, _F16),
    ],
}  # fmt: skip


def main(names: list[str]) -> None:
    built = []
    for name in names:
        for launch_name, kernel, launch in launches():
            began = time.perf_counter()
            made = compile_launch(kernel, launch, TARGETS[name])
            built.append(
                {
                    "target": name,
                    "launch": launch_name,
                    "bytes": len(made.asm[BINARIES[TARGETS[name].backend]]),
                    "shared": made.metadata.shared,
                    "seconds": round(time.perf_counter() - began, 2),
                }
            )
    print(json.dumps(built))


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))

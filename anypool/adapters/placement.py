"""Which device a model runs on, and in what dtype."""

from __future__ import annotations

import logging
import platform

import torch

from anypool.errors import ConfigError
from anypool.model_executor.model_config import ModelConfig

logger = logging.getLogger(__name__)


def pick_device(asked: str) -> torch.device:
    """The device asked for; "auto" is a GPU where there is one. A GPU has its number, which much of torch asks for."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={asked!r}: torch sees no GPU here; use device='cpu'")
    number = int(asked.partition(":")[2]) if ":" in asked else torch.cuda.current_device()
    if number >= torch.cuda.device_count():
        raise ConfigError(f"device={asked!r}: torch sees {torch.cuda.device_count()} GPUs here, counted from 0")
    return torch.device("cuda", number)


def pick_dtype(asked: str, config: ModelConfig, device: torch.device, *, quantized: bool = False) -> torch.dtype:
    """The dtype asked for; "auto" is the checkpoint's own, or half precision around quantised layers.

    Gemma's hidden states grow beyond what float16 holds: it runs in bfloat16 in its place, or is refused where float16
    is asked for.

    A CPU multiplies no float16 fast, and bfloat16 only with instructions for it: there a half-precision checkpoint runs
    in bfloat16 where the CPU has them, and in float32 elsewhere.
    """
    own = "bfloat16" if quantized and _cpu_has_bfloat16() else config.dtype or "float32"
    name = own if asked == "auto" else asked
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"{config.name}: config.json has dtype {name!r}; pass dtype= one of {', '.join(known)}")
    if device.type != "cpu" and name == "float16" and config.model_type.startswith("gemma"):
        if asked == "float16":
            raise ConfigError(
                f"dtype='float16': the hidden states of {config.name} ({config.model_type}) grow beyond what float16 "
                "holds; use dtype='bfloat16' or 'float32'"
            )
        return torch.bfloat16
    if device.type != "cpu" or name == "float32":
        return known[name]
    fast = torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    if asked == "bfloat16" and fast is torch.float32:
        logger.warning("this CPU has no bfloat16 instructions: dtype='float32' would be several times faster")
        return torch.bfloat16
    if asked == "float16":
        logger.warning("no CPU computes fast in float16: running in %s", fast)
    return fast


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware: AVX512_BF16 or AMX on x86; Arm's BF16 extension elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

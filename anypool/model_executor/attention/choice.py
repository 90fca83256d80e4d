"""Which code computes a layer's attention."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.varlen_attention import LARGEST_HEAD

# "varlen" is torch's own for packed sequences, FlashAttention; "triton" is ours; "grouped" is torch's for padded
# batches, over groups of equal lengths, and the CPU path.
Way = Literal["varlen", "triton", "grouped"]
# What we ask of torch's by name.
VARLEN_OPTIONS = frozenset(("scale", "window_size", "enable_gqa", "num_splits"))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a call of attention asks for.

    Attributes:
        dtype: Of queries, keys and values.
        key_size, value_size: Of a head.
        has_softcap, has_sinks, has_bias, has_prefix: What is beside queries and keys.
        has_fewer_keys: Whether some tokens are not attended to.
    """

    dtype: torch.dtype
    key_size: int
    value_size: int
    has_softcap: bool = False
    has_sinks: bool = False
    has_bias: bool = False
    has_prefix: bool = False
    has_fewer_keys: bool = False


def choose_attention(layer: Layer, *, has_varlen: bool, has_triton: bool) -> Way:
    """torch's packed attention where it can express the layer, else our kernel, else groups.

    Args:
        layer: What is asked for.
        has_varlen: Whether torch's packed attention runs on this device.
        has_triton: Whether our kernel does.
    """
    if layer.has_bias:  # one table of scores per head, which neither takes
        return "grouped"
    is_plain = not (layer.has_softcap or layer.has_sinks or layer.has_prefix or layer.has_fewer_keys)
    is_half = layer.dtype in (torch.float16, torch.bfloat16)
    fits = layer.key_size == layer.value_size and layer.key_size % 8 == 0 and layer.key_size <= 256
    if has_varlen and is_plain and is_half and fits:
        return "varlen"
    return "triton" if has_triton and max(layer.key_size, layer.value_size) <= LARGEST_HEAD else "grouped"


def attention_way(layer: Layer, x: torch.Tensor) -> Way:
    """The choice for tensors that lie where `x` does."""
    return choose_attention(layer, has_varlen=has_varlen(x.device), has_triton=uses_triton(x))


def attention_ways(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """How many layers of a native model take which way with whole prompts; empty where layers decide in each call."""
    head_size = getattr(getattr(model, "config", None), "head_size", 0)
    there = torch.empty(0, device=device)
    found: Counter[str] = Counter()
    for module in model.modules():
        attend = getattr(module, "attend", None)
        if attend is not None and hasattr(attend, "softcap"):
            layer = Layer(
                dtype=dtype,
                key_size=head_size,
                value_size=head_size,
                has_softcap=attend.softcap is not None,
                has_bias=bool(getattr(model, "has_attention_bias", False)),
            )
            found[attention_way(layer, there)] += 1
    return dict(found)


@cache
def has_varlen(device: torch.device) -> bool:
    """Whether torch's packed attention runs there: torch 2.11, and an NVIDIA GPU of compute capability 8.

    Earlier releases of torch have it without windows, or without fewer heads of keys than of queries.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    taken = inspect.signature(varlen.varlen_attn).parameters
    return taken.keys() >= VARLEN_OPTIONS and torch.cuda.get_device_capability(device) >= (8, 0)

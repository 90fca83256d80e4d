"""Memory, speed, time and cost of embedding a collection on some kind of device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from anypool.entrypoints.plan.devices import Device, Range
from anypool.entrypoints.plan.lengths import Lengths
from anypool.errors import ConfigError
from anypool.model_executor.cuda_graphs import MAX_TOKENS
from anypool.model_executor.gpu_memory import MemoryPlan, plan_memory
from anypool.model_executor.outline import Outline


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one group of devices that hold the model together does, and what all documents take.

    Attributes:
        memory: Of each device of the group.
        group: Devices in a group: the smallest tensor-parallel degree that fits.
        tokens_per_s: Of a group, at the lowest and the highest share of its peak.
        device_hours: For all documents, the shortest and the longest.
    """

    memory: MemoryPlan
    group: int
    tokens_per_s: Range
    device_hours: Range

    def devices_for(self, days: float) -> tuple[int, int]:
        """How many devices are done with all documents in so many days, at the highest and the lowest share."""
        few, many = (self.group * math.ceil(hours / self.group / (24 * days)) for hours in self.device_hours)
        return few, many

    def cost(self, price_per_hour: float) -> Range:
        """Of all device hours, in the price's currency."""
        low, high = (hours * price_per_hour for hours in self.device_hours)
        return low, high


def estimate(
    outline: Outline,
    device: Device,
    dtype: torch.dtype,
    lengths: Lengths,
    documents: int,
    *,
    batched_tokens: int,
    utilization: float,
) -> Estimate:
    """Plans one kind of device.

    Tokens per second are a share of the device's peak, by the operations of a token; or what its memory allows, where
    that is less: each batch reads all weights once, and each product its input and result.

    Args:
        outline: The model.
        device: The device.
        dtype: Of weights and activations.
        lengths: Of the documents.
        documents: How many there are.
        batched_tokens: Most tokens of a batch.
        utilization: Share of the device's memory that may be taken.

    Raises:
        ConfigError: The model does not fit even where it is split over as many devices as it has heads.
    """
    whole = plan_memory(
        outline.model.to(dtype),
        outline.config,
        total=device.memory,
        utilization=utilization,
        batched_tokens=batched_tokens,
        graph_tokens=MAX_TOKENS if device.name != "cpu" and getattr(outline.model, "can_capture", False) else 0,
        cache_tokens=lengths.longest if outline.config.is_causal and lengths.longest > batched_tokens else 0,
        dtype=dtype,
    )
    group, memory = _smallest_group(whole, outline, device)
    peak = group * device.flops[dtype]
    per_token = lengths.flop(outline) / lengths.mean
    by_memory = math.inf
    if device.bandwidth is not None:
        moved = whole.weights / batched_tokens + outline.width_per_token * dtype.itemsize
        by_memory = group * device.bandwidth / moved
    slow, fast = (min(share * peak / per_token, by_memory) for share in device.share)
    seconds = (documents * lengths.mean / rate for rate in (fast, slow))
    short, long = (group * one / 3600 for one in seconds)
    return Estimate(memory=memory, group=group, tokens_per_s=(slow, fast), device_hours=(short, long))


def _smallest_group(whole: MemoryPlan, outline: Outline, device: Device) -> tuple[int, MemoryPlan]:
    """Over how many devices a model is split, and what each then takes. Activations are counted whole on each."""
    heads, groups = outline.config.num_heads, outline.config.num_kv_heads or outline.config.num_heads
    degrees = [1] if device.name == "cpu" else [n for n in range(1, heads + 1) if heads % n == 0]
    for degree in degrees:
        part = replace(whole, weights=-(-whole.weights // degree), cache=-(-whole.cache // min(degree, groups)))
        if part.fits:
            return degree, part
    raise ConfigError(
        f"{outline.config.name} does not fit {device.name}, whole or split over {degrees[-1]}: it takes {whole}; "
        "take a device with more memory, or lower max_num_batched_tokens"
    )

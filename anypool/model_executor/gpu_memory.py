"""What a model takes of a GPU's memory, told when it is loaded, and the limit that it is held to.

Nothing is reserved: memory is taken when a batch needs it, up to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from anypool.model_executor.distributed import ranks
from anypool.model_executor.layers.split import local_kv_heads
from anypool.model_executor.model_config import ModelConfig

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on a GPU.

    Attributes:
        total: What it has.
        limit: What this process may take.
        weights: Parameters and buffers, heads included.
        adapters: Room for LoRA adapters, which is taken layer by layer when one first has something for it.
        activations: At the largest moment of a batch of `max_num_batched_tokens`.
        graphs: What captured graphs share.
        cache: The key-value store, which is allocated when a prompt first needs it.
    """

    total: int
    limit: int
    weights: int
    activations: int
    adapters: int = 0
    graphs: int = 0
    cache: int = 0

    @property
    def needed(self) -> int:
        return self.weights + self.adapters + self.activations + self.graphs + self.cache

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "LoRA adapters": self.adapters,
            "activations": self.activations,
            "CUDA graphs": self.graphs,
            "key-value cache": self.cache,
        }
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        return f"{_gib(self.needed)} of {_gib(self.limit)} ({_gib(self.total)} in all): {listed}"


def plan_memory(
    model: nn.Module,
    config: ModelConfig,
    *,
    total: int,
    utilization: float,
    batched_tokens: int,
    adapters: int = 0,
    graph_tokens: int = 0,
    cache_tokens: int = 0,
    dtype: torch.dtype,
) -> MemoryPlan:
    """Adds up what a loaded model will take.

    Args:
        model: The pooling model.
        config: Its sizes.
        total: Bytes that the device has.
        utilization: Share of them that may be taken.
        batched_tokens: Most tokens of a batch.
        adapters: Bytes of the room for LoRA adapters.
        graph_tokens: Most tokens of a captured graph; 0 where there are none.
        cache_tokens: Slots of the key-value store; 0 where there is none.
        dtype: Of the activations.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    keys = config.num_layers * local_kv_heads(config.num_heads, config.num_kv_heads) * config.head_size
    slot = 2 * keys + config.hidden_size
    return MemoryPlan(
        total=total,
        limit=int(total * utilization),
        weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        adapters=adapters,
        activations=batched_tokens * per_token(config, dtype),
        graphs=graph_tokens * per_token(config, dtype),
        cache=cache_tokens * slot * dtype.itemsize,
    )


def per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token at the larger of a layer's two moments, about.

    Around attention there are the residual, the fused projection, the turned queries and keys, and what was attended;
    in the feed-forward block the residual, its norm, gate and up side by side, and their product.
    """
    processes = ranks().tp_size
    heads = config.num_heads * config.head_size // processes
    groups = local_kv_heads(config.num_heads, config.num_kv_heads) * config.head_size
    attention = config.hidden_size + 3 * heads + 3 * groups
    feed_forward = 2 * config.hidden_size + 3 * (config.intermediate_size or 4 * config.hidden_size) // processes
    return max(attention, feed_forward) * dtype.itemsize


def cap_memory(device: torch.device, utilization: float) -> None:
    """Has torch raise rather than take more than a share of a GPU's memory."""
    torch.cuda.set_per_process_memory_fraction(float(utilization), device)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"

"""Where replicas run: CPU cores or GPUs of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from anypool.adapters.placement import pick_device
from anypool.config import EngineConfig, require
from anypool.model_executor.cpu_shares import share_cpus
from anypool.model_executor.weights.loading import MAP_WEIGHTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a replica runs.

    Attributes:
        name: For the log.
        cpus: CPUs that it is pinned to; none for anywhere.
        threads: How many it computes with at most; None for torch's choice.
        environment: Variables that its process has of its own.
        memory_share: Its share of the memory of the device.
    """

    name: str
    cpus: tuple[int, ...] = ()
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_share: float = 1.0


def places(config: EngineConfig, *, gpus_each: int = 1) -> list[Place]:
    """A place for each replica.

    Args:
        config: The engine's.
        gpus_each: How many GPUs a replica takes, where it runs on GPUs.

    Raises:
        ConfigError: There are not enough GPUs, or one of them is named.
    """
    count = config.data_parallel_size
    if config.device == "cpu" or not torch.cuda.is_available():
        pick_device(config.device)  # an error where a GPU was asked for
        shares = share_cpus(count)
        if len({cpu for share in shares for cpu in share.cpus}) < count and shares[0].cpus:
            logger.warning("data_parallel_size=%d: there are fewer CPUs, and replicas will share some", count)
        return [
            Place(
                name=f"replica {index}",
                cpus=share.cpus,
                threads=share.threads,
                environment={MAP_WEIGHTS: os.environ.get(MAP_WEIGHTS, "1")},
                memory_share=1 / count,
            )
            for index, share in enumerate(shares)
        ]
    require(
        ":" not in config.device,
        f"device={config.device!r}: replicas take a GPU each, counted from the first; choose which ones there are with "
        f"{_variable()}",
    )
    seen = torch.cuda.device_count()
    require(
        seen >= count * gpus_each,
        f"data_parallel_size={count}: replicas of {gpus_each} GPU{'s' * (gpus_each > 1)} need {count * gpus_each}, and "
        f"torch sees {seen} here",
    )
    listed = os.environ.get(_variable())
    names = listed.split(",") if listed else [str(number) for number in range(seen)]
    return [
        Place(
            name=f"replica {index}",
            environment={_variable(): ",".join(names[index * gpus_each : (index + 1) * gpus_each])},
        )
        for index in range(count)
    ]


def _variable() -> str:
    """What says which GPUs a process sees."""
    return "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"

"""Over how many processes the layers of a model can be split."""

from __future__ import annotations

import math

from torch import nn

from anypool.errors import ConfigError
from anypool.model_executor.model_config import ModelConfig


def require_degree(model_cls: type[nn.Module], config: ModelConfig, size: int) -> None:
    """Refuses a degree of tensor parallelism that a model cannot have.

    Args:
        model_cls: The class that runs it.
        config: Its sizes.
        size: Processes that are to hold it together.

    Raises:
        ConfigError: The class does not say how its layers are split, or the degree does not divide them.
    """
    if size == 1:
        return
    allowed = degrees(config)
    if not getattr(model_cls, "can_split", False) or not allowed:
        raise ConfigError(
            f"tensor_parallel_size={size}: {config.name} is run by {model_cls.__name__}, whose layers cannot be split; "
            "those of decoders and encoders of text can be (docs/parallelism.md). Leave it at 1"
        )
    if size not in allowed:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide {config.name}, which has {config.num_heads} attention heads"
            + (f" and an intermediate_size of {config.intermediate_size:,}" if config.intermediate_size else "")
            + f": it can be {', '.join(map(str, allowed))}"
        )


def degrees(config: ModelConfig) -> tuple[int, ...]:
    """Those that divide the heads of queries and the feed-forward layers, in rising order.

    Heads of keys need not be divided: they stand on several processes.
    """
    most = math.gcd(config.num_heads, config.intermediate_size)
    return tuple(size for size in range(1, most + 1) if most % size == 0)

"""The modules that follow pooling, built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from anypool.errors import CheckpointFormatError
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.loading import load_module
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.activations import activation_from_path
from anypool.pooling.heads import Dense, LayerNorm, Normalize


def build_head(
    repository: Repository, modules: Sequence[tuple[str, str, Mapping[str, Any]]], in_features: int
) -> tuple[nn.Sequential, int]:
    """Builds and loads the modules that follow pooling, in float32.

    Args:
        repository: The checkpoint.
        modules: Of its recipe.
        in_features: Size of the pooled row.

    Returns:
        The modules in order, and the size of the row they give.

    Raises:
        CheckpointFormatError: Sizes do not follow from one another, or an activation is unknown.
    """
    head = nn.Sequential()
    size = in_features
    for kind, path, config in modules:
        if kind == "Normalize":
            head.append(Normalize())
            continue
        where = f"{repository.name}: {path}/config.json"
        module = _dense(where, config) if kind == "Dense" else LayerNorm(_size(where, config, "dimension"))
        if module.in_features != size:
            raise CheckpointFormatError(
                f"{repository.name}: {path} takes rows of {module.in_features}, but what comes before gives {size}"
            )
        load_module(
            module,
            open_checkpoint(repository, path),
            name=f"{repository.name}/{path}",
            renames=((r"^(dense\.)?(weight|bias)$", r"linear.\2"),),
        )
        head.append(module.requires_grad_(False))
        size = module.out_features
    return head, size


def _dense(where: str, config: Mapping[str, Any]) -> Dense:
    return Dense(
        _size(where, config, "in_features"),
        _size(where, config, "out_features"),
        bias=config.get("bias", True),
        # A file without the key means the default of the class that wrote it.
        activation=activation_from_path(config.get("activation_function", "torch.nn.Tanh"), where=where),
        residual=config.get("use_residual", False),
    )


def _size(where: str, config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointFormatError(f"{where} has {key} {size!r}, not a positive integer")
    return size

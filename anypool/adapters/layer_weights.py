"""sentence-transformers' WeightedLayerPooling: token vectors are a weighted mean of several layers' hidden states."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from anypool.config import is_int
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.repository import Repository

logger = logging.getLogger(__name__)

_KEYS = {"embedding_dimension", "word_embedding_dimension", "layer_start", "num_hidden_layers"}


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Which layers count.

    Attributes:
        path: Folder of their weights.
        start: The first of them; 0 is what the first layer takes.
    """

    path: str
    start: int


def read_layer_weights(repository: Repository, path: str) -> LayerWeights:
    """The settings of a WeightedLayerPooling.

    Raises:
        CheckpointFormatError: A key is unknown, or no number of a layer.
    """
    where = f"{path}/config.json"
    config = repository.read_object(where) or {}
    unknown, start = sorted(set(config) - _KEYS), config.get("layer_start", 4)
    if unknown or not is_int(start) or start < 0:
        raise CheckpointFormatError(
            f"{repository.name}: {where} has layer_start {start!r}, and unknown keys: {', '.join(unknown) or 'none'}; "
            f"known: {', '.join(sorted(_KEYS))}"
        )
    return LayerWeights(path=path, start=start)


def mix_layers(
    model: Any, config: ModelConfig, repository: Repository, recipe: LayerWeights, device: torch.device
) -> None:
    """Has a backbone give the weighted mean, sum of w_l h_l over sum of w_l, in place of its last hidden states.

    sentence-transformers does that where config.json has `output_hidden_states`, and leaves the module out elsewhere.

    Raises:
        UnsupportedArchitectureError: The backbone gives its last hidden states alone.
        CheckpointFormatError: There are not as many weights as layers.
    """
    if not config.raw.get("output_hidden_states", False):
        logger.warning(
            "%s: config.json has no output_hidden_states, so that %s has no effect, as in sentence-transformers",
            repository.name,
            recipe.path,
        )
        return
    if not getattr(model, "gives_layers", False):
        raise UnsupportedArchitectureError(
            f"{repository.name}: WeightedLayerPooling needs the hidden states of all layers, which "
            f"{type(model).__name__} does not give for {config.architecture}; native families do"
        )
    checkpoint = open_checkpoint(repository, recipe.path)
    layers = tuple(range(recipe.start, config.num_layers + 1))
    if checkpoint.names() != ["layer_weights"] or checkpoint.shape("layer_weights") != (len(layers),):
        raise CheckpointFormatError(
            f"{repository.name}: {recipe.path} must hold 'layer_weights', one for each of the layers {recipe.start} to "
            f"{config.num_layers}"
        )
    [(_, weights_L)] = checkpoint.tensors({"layer_weights"})
    shares_L = (weights_L.float() / weights_L.float().sum()).to(device)
    run = model.forward

    def forward(*inputs: Any, **named: Any) -> torch.Tensor:
        states_LTD = run(*inputs, output_layers=layers, **named)
        return torch.einsum("l,ltd->td", shares_L.to(states_LTD.dtype), states_LTD)

    model.forward = forward

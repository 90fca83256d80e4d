"""The head of a masked language model, which turns hidden states into a logit per word of the vocabulary.

A product, an activation and a layer norm, then the decoder: as a rule the input embedding itself, and a bias. Names
and formulas are those of transformers' `*ForMaskedLM` classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anypool.errors import UnsupportedArchitectureError, WeightsError
from anypool.model_executor.layers.activation import Activation, activation
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.loading import fill


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where a family keeps its head.

    Attributes:
        dense, norm: Names of the product and of the layer norm.
        decoder: Name of the decoder's weight, where one is stored.
        biases: Names of the decoder's bias: the one that it is computed with, and the one that it is tied to.
        act: The activation; None for the one that the backbone has.
        act_key: The key of config.json that says another.
    """

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    act: str | None = None
    act_key: str | None = None


_BERT = _Layout(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder.weight",
    biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
_ROBERTA = _Layout(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder.weight",
    biases=("lm_head.decoder.bias", "lm_head.bias"),
    act="gelu",
)
_LAYOUTS: dict[str, _Layout] = {
    "albert": _Layout(
        dense="predictions.dense",
        norm="predictions.LayerNorm",
        decoder="predictions.decoder.weight",
        biases=("predictions.decoder.bias", "predictions.bias"),
        act="gelu_new",
        act_key="hidden_act",
    ),
    "bert": _BERT,
    "camembert": _ROBERTA,
    "deberta-v2": _BERT,
    "distilbert": _Layout(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector.weight",
        biases=("vocab_projector.bias",),
    ),
    "electra": _Layout(
        dense="generator_predictions.dense",
        norm="generator_predictions.LayerNorm",
        decoder="generator_lm_head.weight",
        biases=("generator_lm_head.bias",),
        act="gelu",
    ),
    "modernbert": _Layout(
        dense="head.dense",
        norm="head.norm",
        decoder="decoder.weight",
        biases=("decoder.bias",),
        act="gelu",
        act_key="classifier_activation",
    ),
    "mpnet": _ROBERTA,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
# DeBERTa's head in models with "legacy": false, which has no decoder of its own.
_DEBERTA = _Layout(
    dense="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    decoder="",
    biases=("lm_predictions.lm_head.bias",),
)
_EMBEDDINGS = ("word_embeddings", "tok_embeddings")


class Transform(nn.Module):
    """norm(act(W h + b)), in the dtype of the backbone.

    Args:
        in_features, out_features: Size of the hidden states, and of the decoder's rows.
        act: The activation.
        eps: Of the layer norm.
        biases: Whether the product and the norm have one each.
    """

    def __init__(
        self, in_features: int, out_features: int, act: Activation, *, eps: float, biases: tuple[bool, bool]
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, out_features, bias=biases[0])
        self.act = act
        self.norm = nn.LayerNorm(out_features, eps=eps, bias=biases[1])

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        states_TD: torch.Tensor = self.norm(self.act(self.dense(hidden_TD)))
        return states_TD


@dataclass(frozen=True, kw_only=True)
class MaskedLMHead:
    """A head in memory, on the CPU.

    Attributes:
        transform: Hidden states -> what the decoder multiplies.
        decoder_VD: A row per word; None where it is the input embedding.
        bias_V: Added to the logits, or None.
        size: How many words there are.
        tensors: The checkpoint's tensors that it holds.
    """

    transform: Transform
    decoder_VD: torch.Tensor | None
    bias_V: torch.Tensor | None
    size: int
    tensors: frozenset[str]


def read_masked_lm_head(config: ModelConfig, checkpoint: Checkpoint) -> MaskedLMHead:
    """Reads the head of a checkpoint.

    Raises:
        UnsupportedArchitectureError: Nobody has said where this family keeps its head.
        WeightsError: A tensor of it is missing or of a wrong shape.
    """
    layout = _layout_of(config)
    names = _Names(config, checkpoint)
    dense, norm = names.stored(f"{layout.dense}.weight"), names.stored(f"{layout.norm}.weight", f"{layout.norm}.gamma")
    optional = {
        "dense.bias": names.find(f"{layout.dense}.bias"),
        "norm.bias": names.find(f"{layout.norm}.bias", f"{layout.norm}.beta"),
    }
    out_features, in_features = checkpoint.shape(dense)
    transform = Transform(
        in_features,
        out_features,
        activation(_activation_name(layout, config)),
        eps=config.norm_eps,
        biases=(optional["dense.bias"] is not None, optional["norm.bias"] is not None),
    )
    stored = {"dense.weight": dense, "norm.weight": norm}
    stored |= {slot: tensor for slot, tensor in optional.items() if tensor is not None}
    fill(transform, checkpoint, stored, name=config.name)
    decoder_VD, tensors = _decoder(layout, names, out_features)
    bias = names.find(*layout.biases)
    if bias is None and layout is not _LAYOUTS["modernbert"]:
        raise names.missing(layout.biases[0])
    bias_V = None if bias is None else names.read(bias)
    embedding = names.stored(*(f"{name}.weight" for name in _EMBEDDINGS))
    size = checkpoint.shape(embedding)[0] if decoder_VD is None else len(decoder_VD)
    if bias_V is not None and bias_V.shape != (size,):
        raise WeightsError(f"{config.name}: tensor {bias!r} has shape {list(bias_V.shape)}; expected [{size}]")
    return MaskedLMHead(
        transform=transform.requires_grad_(False),
        decoder_VD=decoder_VD,
        bias_V=bias_V,
        size=size,
        tensors=frozenset({*stored.values(), *tensors}),
    )


def word_embeddings(model: nn.Module) -> nn.Parameter:
    """The input embedding of a loaded backbone, `[V, D]`; a copy where it is split over processes."""
    found: list[Any] = [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in _EMBEDDINGS]
    assert found, "a backbone with a masked language model's head has word embeddings"
    embedding = found[0]
    if isinstance(embedding, Embedding) and embedding.split:
        return nn.Parameter(embedding.table(), requires_grad=False)
    parameter: nn.Parameter = embedding.weight
    return parameter


def _layout_of(config: ModelConfig) -> _Layout:
    if config.model_type == "deberta-v2" and config.raw.get("legacy") is False:
        return _DEBERTA
    layout = _LAYOUTS.get(config.model_type)
    if layout is None:
        raise UnsupportedArchitectureError(
            f"{config.name}: the masked language model's head of {config.architecture} is not known; SPLADE is "
            f"supported for the model types {', '.join(_LAYOUTS)}"
        )
    return layout


def _activation_name(layout: _Layout, config: ModelConfig) -> str:
    given = config.raw.get(layout.act_key) if layout.act_key is not None else None
    return str(given) if given else layout.act or config.hidden_act


def _decoder(layout: _Layout, names: _Names, width: int) -> tuple[torch.Tensor | None, set[str]]:
    """The decoder where it is not the input embedding, and which tensors were read for it.

    transformers ties the two where the checkpoint has one of them, or both and they are equal.
    """
    stored = names.find(layout.decoder) if layout.decoder else None
    if stored is None:
        return None, set()
    embedding = names.find(*(f"{name}.weight" for name in _EMBEDDINGS))
    decoder_VD = names.read(stored)
    if decoder_VD.shape[1] != width:
        raise WeightsError(
            f"{names.config.name}: tensor {stored!r} has shape {list(decoder_VD.shape)}; its rows must have {width}"
        )
    is_tied = embedding is not None and torch.equal(decoder_VD, names.read(embedding))
    return (None if is_tied else decoder_VD), {stored}


class _Names:
    """Looks a checkpoint's tensors up by their endings: the base model's name may stand before them."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config, self.checkpoint = config, checkpoint
        self.all = checkpoint.names()

    def find(self, *endings: str) -> str | None:
        for ending in endings:
            found = [name for name in self.all if name == ending or name.endswith(f".{ending}")]
            if found:
                return min(found, key=len)
        return None

    def stored(self, *endings: str) -> str:
        name = self.find(*endings)
        if name is None:
            raise self.missing(endings[0])
        return name

    def read(self, name: str) -> torch.Tensor:
        [(_, tensor)] = self.checkpoint.tensors({name})
        return tensor

    def missing(self, tensor: str) -> WeightsError:
        return WeightsError(
            f"{self.config.name}: the masked language model's head needs a tensor {tensor!r}, which is missing: "
            "the checkpoint was saved without its head"
        )


def placed(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A tensor of a head as a parameter where the backbone runs."""
    return nn.Parameter(tensor.to(device, dtype), requires_grad=False)

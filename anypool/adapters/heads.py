"""Heads with weights of their own: classifiers and reward heads as checkpoints hold them.

A head is a chain of layers over one row: the pooled row of a text, or each token's. Which layers a family has, and
which row it pools, is a table; sizes come from the tensors. The formulas are those of transformers' `*ForSequence-
Classification` and `*ForTokenClassification` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from anypool.config import is_int, require
from anypool.errors import CheckpointFormatError, ConfigError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.loading import fill
from anypool.pooling.heads import Dense, LayerNorm
from anypool.pooling.methods import PoolingType

_ACTIVATIONS: dict[str | None, Callable[[], nn.Module]] = {
    None: nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_new": partial(nn.GELU, approximate="tanh"),
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}
# Pooling types that give a row per text.
_ONE_ROW = tuple(kind for kind in PoolingType if kind not in (PoolingType.ALL, PoolingType.STEP))


@dataclass(frozen=True, kw_only=True)
class HeadLayer:
    """One layer of a head.

    Attributes:
        tensor: Name of its tensors in the checkpoint without `.weight` and `.bias`, and without the base model's name.
        activation: Applied after it: None, tanh, relu, gelu, gelu_new (its tanh form) or silu.
        norm: Whether it is a layer norm rather than a product.
        bias: Whether the checkpoint has a bias for it; None where either is right.

    Raises:
        ConfigError: The name of the tensor is no text.
    """

    tensor: str
    activation: str | None = None
    norm: bool = False
    bias: bool | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.tensor, str) and self.tensor != "", f"HeadLayer: tensor={self.tensor!r} is not a name")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """A head: its layers, and the row they run on.

    Attributes:
        layers: In order; the last gives one column per label.
        pooling: The row of a text that a sequence-level head runs on.
        token_level: Whether it gives a row per token.
        step_tag_id: For process-reward models, the token whose rows are the steps' scores.
        reported_column: For rewards out of several labels, the one that is the reward.

    Raises:
        ConfigError: A value is of the wrong type, or the pooling gives more than one row per text.
    """

    layers: tuple[HeadLayer, ...]
    pooling: PoolingType = PoolingType.LAST_NOT_PAD
    token_level: bool = False
    step_tag_id: int | None = None
    reported_column: int | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.layers, (list, tuple)) and all(isinstance(layer, HeadLayer) for layer in self.layers),
            f"HeadRecipe: layers={self.layers!r} is not a tuple of HeadLayer",
        )
        object.__setattr__(self, "layers", tuple(self.layers))
        require(
            self.pooling in _ONE_ROW, f"HeadRecipe: pooling={self.pooling!r} is unknown; known: {', '.join(_ONE_ROW)}"
        )
        object.__setattr__(self, "pooling", PoolingType(self.pooling))
        for name in ("step_tag_id", "reported_column"):
            value = getattr(self, name)
            require(value is None or is_int(value), f"HeadRecipe: {name}={value!r} is not a number")


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head in memory.

    Attributes:
        module: Rows `[N, D]` float32 -> `[N, labels]`.
        recipe: What it was built from.
        labels: How many columns it gives.
        tensors: The checkpoint's tensors that it holds.
        is_reward: Whether its checkpoint is a reward model's.
        activation: What its checkpoint says turns its scores into probabilities; None where it says nothing.
    """

    module: nn.Module
    recipe: HeadRecipe
    labels: int
    tensors: frozenset[str] = frozenset()
    is_reward: bool = False
    activation: str | None = None


def _chain(*layers: str | tuple[str, str | None], bias: bool | None = True) -> tuple[HeadLayer, ...]:
    pairs = ((layer, None) if isinstance(layer, str) else layer for layer in layers)
    return tuple(HeadLayer(tensor=tensor, activation=activation, bias=bias) for tensor, activation in pairs)


_POOLER = _chain(("pooler.dense", "tanh"), "classifier")
_DENSE = _chain(("classifier.dense", "tanh"), "classifier.out_proj")
_BY_HIDDEN_ACT = _chain(("classifier.dense", "hidden_act"), "classifier.out_proj")  # what config.json calls so
_SUMMARY = _chain("sequence_summary.summary")
_MODERN = _chain(("head.dense", "gelu"), bias=None)

# Sequence classification of encoders, by model type. All other families are decoders: `score` on the last token.
_SEQUENCE: dict[str, tuple[HeadLayer, ...]] = {
    "albert": _chain(("pooler", "tanh"), "classifier"),
    "bert": _POOLER,
    "big_bird": _BY_HIDDEN_ACT,
    "camembert": _DENSE,
    "canine": _POOLER,
    "convbert": _BY_HIDDEN_ACT,
    "ctrl": _chain("classifier", bias=None),
    "data2vec-text": _DENSE,
    "deberta": _chain(("pooler.dense", "gelu"), "classifier"),
    "deberta-v2": _chain(("pooler.dense", "gelu"), "classifier"),
    "distilbert": _chain(("pre_classifier", "relu"), "classifier"),
    "electra": _chain(("classifier.dense", "gelu"), "classifier.out_proj"),
    "ernie": _POOLER,
    "esm": _DENSE,
    "esmc": _DENSE,
    "eurobert": _chain(("dense", "gelu"), "classifier"),
    "flaubert": _SUMMARY,
    "fnet": _POOLER,
    "gte": _POOLER,
    "ibert": _DENSE,
    "jina_embeddings_v3": _DENSE,
    "layoutlm": _POOLER,
    "luke": _POOLER,
    "megatron-bert": _POOLER,
    "mobilebert": _POOLER,
    "mra": _BY_HIDDEN_ACT,
    "nomic_bert": _POOLER,
    "nystromformer": _BY_HIDDEN_ACT,
    "rembert": _POOLER,
    "roberta-prelayernorm": _DENSE,
    "roc_bert": _POOLER,
    "roformer": _BY_HIDDEN_ACT,
    "squeezebert": _POOLER,
    "tapas": _POOLER,
    "ultrabert": _chain("classifier"),
    "xlm": _SUMMARY,
    "xlm-roberta-xl": _DENSE,
    "xlnet": _chain(("sequence_summary.summary", "tanh"), "logits_proj"),
    "xmod": _DENSE,
    "yoso": _BY_HIDDEN_ACT,
    "modernbert": (*_MODERN, HeadLayer(tensor="head.norm", norm=True), *_chain("classifier")),
    "modernbert-decoder": (*_MODERN, HeadLayer(tensor="head.norm", norm=True), *_chain("classifier", bias=None)),
    "mpnet": _DENSE,
    "roberta": _DENSE,
    "xlm-roberta": _DENSE,
}
# The row of these, where it is not the first; by `classifier_pooling` of config.json where that decides.
_SEQUENCE_POOLING: dict[str, PoolingType | dict[str, PoolingType]] = {
    "ctrl": PoolingType.LAST_NOT_PAD,
    "eurobert": {"bos": PoolingType.CLS, "mean": PoolingType.MEAN},
    "modernbert": {"cls": PoolingType.CLS, "mean": PoolingType.MEAN},
    "modernbert-decoder": PoolingType.LAST_NOT_PAD,
    "ultrabert": {"cls": PoolingType.CLS, "mean": PoolingType.MEAN},
    "xlnet": PoolingType.LAST,
}
_SCORE = _chain("score", bias=None)
_TWO_LAYER_SCORE = _chain(("score.0", "relu"), "score.2")

# Reward heads, by the tensor that tells them apart.
_REWARD: dict[str, HeadRecipe] = {
    "score.0": HeadRecipe(layers=_TWO_LAYER_SCORE),
    "score": HeadRecipe(layers=_SCORE),
    "v_head": HeadRecipe(layers=_chain("v_head", bias=None), pooling=PoolingType.LAST),
    "regression_head": HeadRecipe(layers=_chain("regression_head", bias=None), pooling=PoolingType.LAST),
}
# `<extra_0>` of Qwen2.5-Math-PRM; the second label is "this step is right".
_QWEN_STEP = 151651

_REGISTERED: dict[str, HeadRecipe] = {}


def register_head(architecture: str, recipe: HeadRecipe) -> None:
    """Makes a head of one's own known: checkpoints of this architecture are read with it.

    Args:
        architecture: The name that `architectures` in config.json has.
        recipe: Layers and the row they run on.
    """
    require(isinstance(architecture, str) and architecture != "", f"architecture={architecture!r} is not a name")
    if not isinstance(recipe, HeadRecipe) or not recipe.layers:
        raise ConfigError(f"recipe={recipe!r} is not a HeadRecipe with at least one layer")
    _REGISTERED[architecture] = recipe


def registered_heads() -> dict[str, HeadRecipe]:
    """What `register_head` was given, by architecture."""
    return dict(_REGISTERED)


def find_head(config: ModelConfig, checkpoint: Checkpoint) -> Head | None:
    """Builds and loads the head that a checkpoint holds; None where its architecture has none.

    Raises:
        CheckpointFormatError: The architecture should have a head, and none that is known is there.
        ConfigError: A recipe of one's own does not fit the head's tensors.
        WeightsError: Tensors of the head are missing or of a wrong shape.
    """
    recipe = _REGISTERED.get(config.architecture) or _recipe_of(config, checkpoint)
    if recipe is None:
        return None
    module, stored = nn.Sequential(), {}
    size = config.hidden_size
    for index, layer in enumerate(recipe.layers):
        tensor = _stored_name(layer.tensor, config, checkpoint)
        has_bias = f"{tensor}.bias" in checkpoint.names()
        if layer.bias and not has_bias:
            raise _missing(f"{layer.tensor}.bias", config)
        if layer.bias is False and has_bias:
            raise WeightsError(f"{config.name}: '{tensor}.bias' is there, and the head of this layer has bias=False")
        built = _build(layer, config, tensor, checkpoint.shape(f"{tensor}.weight"), size, has_bias)
        module.append(built)
        size = int(built.out_features)
        inner = "norm" if layer.norm else "linear"
        for part in ("weight", "bias") if has_bias else ("weight",):
            stored[f"{index}.{inner}.{part}"] = f"{tensor}.{part}"
    fill(module, checkpoint, stored, name=config.name)
    _check_labels(size, config, recipe)
    return Head(
        module=module.requires_grad_(False),
        recipe=recipe,
        labels=size,
        tensors=frozenset(stored.values()),
        is_reward="Reward" in config.architecture,
    )


def _recipe_of(config: ModelConfig, checkpoint: Checkpoint) -> HeadRecipe | None:
    architecture = config.architecture
    if architecture.endswith("ForTokenClassification"):
        return HeadRecipe(layers=_token_layers(config, checkpoint), token_level=True)
    if architecture.endswith("ForSequenceClassification"):
        if config.is_encoder_decoder:
            raise UnsupportedArchitectureError(
                f"{config.name}: the head of {architecture} reads the decoder's states, and of an encoder-decoder only "
                "the encoder runs; convert='embed' takes its embeddings"
            )
        return _sequence_recipe(config)
    if "Reward" not in architecture:
        return None
    for tensor, recipe in _REWARD.items():
        if f"{tensor}.weight" in checkpoint.names():
            if architecture.endswith("ForProcessRewardModel"):
                return replace(recipe, token_level=True, step_tag_id=_QWEN_STEP, reported_column=1)
            return recipe
    raise CheckpointFormatError(
        f"{config.name}: {architecture} has none of the reward heads that are known: {', '.join(_REWARD)}"
    )


def _sequence_recipe(config: ModelConfig) -> HeadRecipe:
    layers = _SEQUENCE.get(config.model_type)
    if layers is None:
        return HeadRecipe(layers=_SCORE)
    layers = tuple(replace(layer, activation=_activation(layer, config)) for layer in layers)
    pooling = _SEQUENCE_POOLING.get(config.model_type, PoolingType.CLS)
    if isinstance(pooling, dict):
        if config.head.pooling not in pooling:
            raise UnsupportedArchitectureError(
                f"{config.name}: config.json has classifier_pooling={config.head.pooling!r}; for "
                f"{config.architecture} the head's row may be: {', '.join(pooling)}"
            )
        pooling = pooling[config.head.pooling]
    return HeadRecipe(layers=layers, pooling=pooling)


def _activation(layer: HeadLayer, config: ModelConfig) -> str | None:
    """The activation of a layer, where config.json may say another."""
    if layer.activation == "hidden_act":
        return config.hidden_act
    is_open = layer.tensor in ("head.dense", "pooler.dense") and layer.activation == "gelu"
    return config.head.activation or layer.activation if is_open else layer.activation


def _token_layers(config: ModelConfig, checkpoint: Checkpoint) -> tuple[HeadLayer, ...]:
    if config.model_type == "modernbert":
        return _sequence_recipe(config).layers
    return _chain("classifier") if "classifier.weight" in checkpoint.names() else _SCORE


def _stored_name(tensor: str, config: ModelConfig, checkpoint: Checkpoint) -> str:
    """The tensor's name in the checkpoint, where the base model's own name may stand before it."""
    ending = f"{tensor}.weight"
    found = [name for name in checkpoint.names() if name == ending or name.endswith(f".{ending}")]
    if not found:
        raise _missing(ending, config)
    return min(found, key=len).removesuffix(".weight")


def _missing(tensor: str, config: ModelConfig) -> WeightsError:
    return WeightsError(
        f"{config.name}: the head of {config.architecture} needs a tensor {tensor!r}, which is missing; "
        "a head of another form is described with register_head"
    )


def _check_labels(labels: int, config: ModelConfig, recipe: HeadRecipe) -> None:
    if config.head.labels is not None and config.head.labels != labels:
        raise WeightsError(
            f"{config.name}: config.json has {config.head.labels} labels, the head's tensor {labels} rows"
        )
    if recipe.reported_column is not None and not 0 <= recipe.reported_column < labels:
        raise ConfigError(
            f"{config.name}: the reward of {config.architecture} is column {recipe.reported_column} of its head, "
            f"which has the columns 0 to {labels - 1}"
        )


def _build(
    layer: HeadLayer, config: ModelConfig, tensor: str, shape: tuple[int, ...], size: int, bias: bool
) -> Dense | LayerNorm:
    """A layer for rows of `size`, of the shape that its tensor has."""
    if len(shape) != (1 if layer.norm else 2) or shape[-1] != size:
        raise WeightsError(
            f"{config.name}: tensor '{tensor}.weight' has shape {list(shape)}, and what comes before gives "
            f"rows of {size}"
        )
    if layer.norm:
        return LayerNorm(shape[0], eps=config.norm_eps, bias=bias)
    if layer.activation not in _ACTIVATIONS:
        known = ", ".join(str(name) for name in _ACTIVATIONS)
        raise CheckpointFormatError(
            f"{config.name}: unknown activation {layer.activation!r} in the head; known: {known}"
        )
    return Dense(shape[1], shape[0], bias=bias, activation=_ACTIVATIONS[layer.activation]())


def labels_of(config: ModelConfig, columns: Sequence[int]) -> Mapping[int, str]:
    """Names of the labels of some of a head's columns by their place, LABEL_0 and so on where the file has none."""
    return {i: config.head.id2label.get(column, f"LABEL_{column}") for i, column in enumerate(columns)}

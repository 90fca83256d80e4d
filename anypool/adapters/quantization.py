"""Quantises a loaded model, and says how close it stays to what it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from anypool.errors import ConfigError
from anypool.model_executor.layers.int8 import int8_works
from anypool.model_executor.layers.packing import QuantizedLayers, quantize_linears
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.packed_batch import PackedBatch
from anypool.pooling.methods import PoolingType, pool

logger = logging.getLogger(__name__)

Encode = Callable[[Sequence[str]], list[list[int]]]

# Short texts of several kinds: what a model does to them before and after is compared.
PROBE_TEXTS = (
    "Berlin",
    "how tall is the eiffel tower",
    "The quick brown fox jumps over the lazy dog.",
    "She closed the shop at six, counted the money twice, and walked home along the river without a word to anybody.",
    "The second clause of the contract obliges the supplier to replace defective parts within thirty days of notice.",
    "Photosynthesis turns light into chemical energy: chlorophyll absorbs it, water is split, and oxygen is released.",
    "def mean(values):\n    return sum(values) / len(values)",
    '{"id": 4711, "name": "bolt M8x40", "price": 0.35, "tags": ["steel", "metric"]}',
    "Die Lieferung kam drei Tage zu spät, und niemand ging ans Telefon.",
    "El tren de las ocho sale hoy del andén número cinco.",
    "敏捷的棕色狐狸跳过了懒狗。",
    "1. Preheat the oven to 180 °C. 2. Beat 3 eggs. 3. Add 250 g of flour, a little at a time. 4. Bake for 40 minutes!",
    "worst. phone. ever!! battery dead after 2 hrs :( want my money back",
)
_MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What was quantised, and how close the model stays to what it was.

    Attributes:
        layers: Which linear layers were quantised.
        mean_cosine, min_cosine: Of each probe text's vector with that before.
    """

    layers: QuantizedLayers
    mean_cosine: float
    min_cosine: float


def require_int8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises a `ConfigError` where nothing multiplies integers."""
    if device.type != "cpu":
        raise ConfigError(
            f"quantization='int8' runs on the CPU only, not on {device}; pass device='cpu' or leave it out"
        )
    if not int8_works(dtype):
        raise ConfigError(
            "quantization='int8': torch's oneDNN operations for integers are missing here or give wrong numbers, which "
            "they do on x86 CPUs older than VNNI; leave it out"
        )


def quantize(
    model: nn.Module,
    config: ModelConfig,
    *,
    leave: Iterable[nn.Module],
    types: tuple[PoolingType, ...],
    encode: Encode | None,
    minimum: float,
) -> Quantization:
    """Quantises the linear layers of a model on the CPU, and compares its vectors with those before.

    Args:
        model: It has its weights.
        config: Of the model.
        leave: Modules that stay as they are.
        types: How vectors are pooled from hidden states.
        encode: The tokenizer's ids of texts; None for a model without one, which gets random ids.
        minimum: The lowest mean cosine that is taken; 0 for any.

    Raises:
        ConfigError: The vectors are further apart, or there was nothing to quantise.
    """
    batch = PackedBatch.pack(_probe_ids(config, encode), device=torch.device("cpu"))
    before_NE = _vectors(model, batch, types)
    layers = quantize_linears(model, leave=leave)
    if not layers.quantized:
        raise ConfigError(
            f"quantization='int8': {config.name} has no linear layer to quantise: they are narrow, have outliers, or "
            "are computed by the module itself; leave it out"
        )
    cosines_N = F.cosine_similarity(before_NE, _vectors(model, batch, types), dim=-1)
    mean, lowest = float(cosines_N.mean()), float(cosines_N.min())
    if minimum > 0 and not mean >= minimum:  # NaN is refused as well
        raise ConfigError(
            f"quantization='int8' changes {config.name} too much: on {len(cosines_N)} probe texts the mean cosine with "
            f"the unquantised model is {mean:.4f} (lowest {lowest:.4f}), below min_quantized_cosine={minimum:g}; "
            "leave quantization out, or pass a lower min_quantized_cosine (0 takes any)"
        )
    logger.info(
        "%s in int8: %d linear layers quantised, %d kept; cosine with the unquantised model on %d texts: "
        "mean %.4f, lowest %.4f",
        config.name,
        len(layers.quantized),
        len(layers.kept),
        len(cosines_N),
        mean,
        lowest,
    )
    return Quantization(layers=layers, mean_cosine=mean, min_cosine=lowest)


def _probe_ids(config: ModelConfig, encode: Encode | None) -> list[list[int]]:
    most = min(_MOST_TOKENS, config.max_positions)
    if encode is not None:
        texts = [[i for i in ids if i < config.vocab_size][:most] for ids in encode(PROBE_TEXTS)]
        if all(texts):
            return texts
    generator = torch.Generator().manual_seed(0)
    lengths = [min(most, 3 + 5 * i) for i in range(len(PROBE_TEXTS))]
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def _vectors(model: Any, batch: PackedBatch, types: tuple[PoolingType, ...]) -> torch.Tensor:
    """`[N, E]` float32."""
    hidden_TD: torch.Tensor = model(batch.input_ids_T, batch.positions_T, batch.attn)
    return pool(hidden_TD, batch.segments, types).float()

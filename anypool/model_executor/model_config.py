"""The configuration of a checkpoint: config.json's foreign keys in, a frozen `ModelConfig` out.

Families that run natively are read key by key (`config_readers`). Every other family is read by transformers' own
configuration class. Nothing else reads config.json.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from anypool.errors import CheckpointFormatError, MissingDependencyError, ModelLoadError, UnsupportedArchitectureError
from anypool.model_executor.config_keys import Keys
from anypool.model_executor.config_readers import (
    DECODERS,
    DEFAULT_ARCHITECTURES,
    FULL,
    READERS,
    SLIDING,
    DisentangledConfig,
    HeadConfig,
    read_head,
)
from anypool.model_executor.families import Family, find_family, refuse_unknown_attention, translate
from anypool.model_executor.layers.rotary import RopeConfig, frequency_length
from anypool.model_executor.weights.repository import Repository

logger = logging.getLogger(__name__)

__all__ = ["FULL", "SLIDING", "DisentangledConfig", "HeadConfig", "ModelConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the rest of the code knows about a checkpoint.

    Attributes:
        name: The model as the user named it.
        architecture: The class name in `architectures`, e.g. `LlamaForCausalLM`.
        model_type: The family, e.g. `llama`.
        hidden_size, num_layers, num_heads, num_kv_heads, head_size, intermediate_size, vocab_size: Sizes.
        max_positions: Longest text the position embeddings allow.
        is_causal: False where a decoder attends in both directions.
        layer_types: Kind of attention per layer, `full_attention` or `sliding_attention`.
        sliding_window: Distance, exclusive, up to which a sliding layer sees keys.
        rope: Rotary embedding per kind of layer.
        attention_scale: Factor on attention scores.
        head: What it says about a classification head.
        dtype: The dtype that the checkpoint names, or None.
        norm_bias: Whether layer norms have a bias.
        relative_buckets: Rows of MPNet's relative position bias.
        disentangled: DeBERTa's attention.
        matryoshka_dimensions: Sizes it was trained to be cut to; None where none are named.
        is_matryoshka: What the checkpoint says about being cut; None where it says nothing.
        is_encoder_decoder: Whether it is an encoder and a decoder, of which the encoder is run.
        not_native: Why no native class runs it although there is one for its family; None where none stands against it.
        family: What its family's own code does, where config.json does not say it.
        raw: config.json with the user's overrides, for transformers' own classes.
    """

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_positions: int
    num_kv_heads: int = 0
    head_size: int = 0
    intermediate_size: int = 0
    hidden_act: str = "gelu"
    norm_eps: float = 1e-6
    is_causal: bool = True
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope: Mapping[str, RopeConfig] = field(default_factory=dict)
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    type_vocab_size: int = 0
    norm_bias: bool = True
    relative_buckets: int = 0
    disentangled: DisentangledConfig | None = None
    pad_token_id: int | None = None
    head: HeadConfig = field(default_factory=HeadConfig)
    dtype: str | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    is_matryoshka: bool | None = None
    trust_remote_code: bool = False
    is_encoder_decoder: bool = False
    not_native: str | None = None
    family: Family | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_pretrained(
        cls,
        repository: Repository,
        *,
        overrides: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> ModelConfig:
        """Reads a checkpoint's configuration.

        Args:
            repository: The checkpoint.
            overrides: Keys laid over config.json.
            trust_remote_code: Whether transformers may run code that comes with the checkpoint.

        Raises:
            CheckpointFormatError: A key is missing or has a value that is not understood.
            UnsupportedArchitectureError: transformers does not know the model type either.
        """
        raw = {**repository.read_config(), **(overrides or {})}
        _refuse_quantized(raw)
        llm2vec = repository.read_object("llm2vec_config.json")
        family = find_family(raw, llm2vec, name=repository.name, trust_remote_code=trust_remote_code)
        if family is not None and family.config:
            raw = {**{key: value for key, value in raw.items() if key != "auto_map"}, **family.config}
        elif not (trust_remote_code and "auto_map" in raw):
            raw = translate(raw, repository.name)
        architectures = raw.get("architectures") or []
        model_type = raw.get("model_type")
        if not isinstance(model_type, str):
            raise CheckpointFormatError(f"{repository.name}: config.json has model_type {model_type!r}, not a name")
        if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
            raise CheckpointFormatError(
                f"{repository.name}: config.json has architectures {architectures!r}, not a list of names"
            )
        reader = READERS.get(model_type)
        keys = Keys(raw, repository.name)
        common: dict[str, Any] = {
            "name": repository.name,
            "architecture": architectures[0] if architectures else DEFAULT_ARCHITECTURES.get(model_type, ""),
            "model_type": model_type,
            "raw": raw,
            "family": family,
            "trust_remote_code": trust_remote_code,
            "dtype": _dtype_name(keys),
            "matryoshka_dimensions": _sizes(keys),
            "is_matryoshka": keys.get("is_matryoshka", None),
            "head": read_head(keys),
            "pad_token_id": keys.get("pad_token_id", None),
        }
        if trust_remote_code and "auto_map" in raw:
            not_native = f"{repository.name}: trust_remote_code=True: its own code runs it, no native class"
            return cls(**{**common, **_read_with_transformers(repository, raw, True), "not_native": not_native})
        if reader is None:
            return cls(**{**common, **_read_with_transformers(repository, raw, trust_remote_code)})
        if "auto_map" in raw:
            if model_type in DECODERS and repository.exists("modules.json"):
                refuse_unknown_attention(raw, repository.name)
            logger.warning(
                "%s comes with code of its own, which does not run: pass trust_remote_code=True if you trust it and "
                "its numbers differ from those of %s",
                repository.name,
                model_type,
            )
        try:
            config = cls(**{**common, **reader(keys)})
        except UnsupportedArchitectureError as error:  # a value that the native class does not implement
            try:
                through = _read_with_transformers(repository, raw, trust_remote_code)
            except (ModelLoadError, MissingDependencyError):
                raise error from None
            return cls(**{**common, **through, "not_native": str(error)})
        keys.report_unknown()
        return config

    @classmethod
    def of_table(cls, name: str, size: tuple[int, int], *, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """The configuration of a table of token vectors, which has no transformer and is held in float32.

        Args:
            name: The model as the user named it.
            size: Tokens, and the size of their vectors.
            overrides: What the user says about cutting vectors: `matryoshka_dimensions`, `is_matryoshka`.
        """
        keys = Keys(overrides or {}, name)
        config = cls(
            name=name,
            architecture="StaticEmbedding",
            model_type="static",
            vocab_size=size[0],
            hidden_size=size[1],
            num_layers=0,
            num_heads=0,
            max_positions=1 << 30,
            is_causal=False,
            matryoshka_dimensions=_sizes(keys),
            is_matryoshka=keys.get("is_matryoshka", None),
            raw=keys.raw,
        )
        keys.report_unknown()
        return config

    def frequency_lengths(self, length: int) -> tuple[int, ...]:
        """What rotary keys take from a prompt's length: prompts share cached keys only where this is equal."""
        return tuple(frequency_length(rope, length) for rope in self.rope.values())

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)


def _read_with_transformers(repository: Repository, raw: Mapping[str, Any], trust: bool) -> dict[str, Any]:
    """Reads the fields that every family has, through transformers' configuration class and its aliases."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependencyError(
            f"{repository.name} (model type {raw['model_type']!r}) needs transformers: "
            "pip install 'anypool[transformers]'"
        ) from error
    try:
        config = (
            AutoConfig.for_model(**{"trust_remote_code": trust, **raw})
            if "auto_map" not in raw or not trust
            else (AutoConfig.from_pretrained(repository.folder, trust_remote_code=True))
        )
    except Exception as error:  # configuration classes raise whatever they meet in a value
        if raw["model_type"] in _known_to_transformers():
            raise CheckpointFormatError(
                f"{repository.name}: config.json is not one of a {raw['model_type']!r}: {type(error).__name__}: {error}"
            ) from error
        hint = "; its own code is needed: pass trust_remote_code=True if you trust it" if "auto_map" in raw else ""
        raise UnsupportedArchitectureError(
            f"{repository.name}: transformers does not know the model type {raw['model_type']!r}{hint}"
        ) from error
    is_encoder_decoder = bool(config.is_encoder_decoder)
    text = getattr(config, "encoder", None)  # an encoder-decoder may have a configuration for each
    if not hasattr(text, "hidden_size"):
        text = config if is_encoder_decoder else config.get_text_config()
    values: dict[str, Any] = {}
    for ours, theirs, fallback in (
        ("hidden_size", "hidden_size", None),
        ("num_layers", "num_hidden_layers", None),
        ("num_heads", "num_attention_heads", 0),
        ("vocab_size", "vocab_size", sys.maxunicode + 1),  # CANINE has none: it reads characters
        ("max_positions", "max_position_embeddings", 1 << 30),
    ):
        found = getattr(text, theirs, None)
        if found is None and fallback is None:
            raise ModelLoadError(f"{repository.name}: a {raw['model_type']!r} configuration has no {theirs}")
        values[ours] = fallback if found is None or found < 0 else found
    values["pad_token_id"] = getattr(text, "pad_token_id", None)
    # Some OPT models project their states down to the size of their embeddings.
    values["hidden_size"] = getattr(text, "word_embed_proj_dim", None) or values["hidden_size"]
    values["is_causal"] = raw.get("is_causal", True)
    values["is_encoder_decoder"] = is_encoder_decoder
    values["tie_word_embeddings"] = bool(getattr(text, "tie_word_embeddings", False))
    values["final_softcap"] = getattr(text, "final_logit_softcapping", None)
    values["hidden_act"] = str(getattr(text, "hidden_act", None) or "gelu")
    values["norm_eps"] = getattr(text, "layer_norm_eps", None) or getattr(text, "norm_eps", None) or 1e-6
    return values


def _known_to_transformers() -> Collection[str]:
    from transformers import CONFIG_MAPPING

    return list(CONFIG_MAPPING.keys())


def _refuse_quantized(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedArchitectureError(
            f"the checkpoint is quantized ({method}), which is not supported: use unquantized weights or a GGUF file"
        )


def _dtype_name(keys: Keys) -> str | None:
    given = keys.get("dtype", None) or keys.get("torch_dtype", None)
    return str(given).removeprefix("torch.") if given is not None else None


def _sizes(keys: Keys) -> tuple[int, ...] | None:
    given = keys.get("matryoshka_dimensions", None)
    return tuple(sorted(given)) if given is not None else None

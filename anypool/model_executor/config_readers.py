"""How each native family writes its config.json: keys in, fields of `ModelConfig` out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.config_keys import Keys
from anypool.model_executor.layers.rotary import FREQUENCIES, RopeConfig

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True, kw_only=True)
class DisentangledConfig:
    """DeBERTa's attention to relative positions, and what comes with it.

    Attributes:
        span: Rows of the position table per direction; 0 for none.
        furthest: Distance from which on all positions are one.
        logarithmic: Whether far positions share rows.
        kinds: Which extra scores there are, of "c2p" and "p2c".
        share_key: Whether positions are projected as content is.
        normalize: Whether the position table is normalised.
        absolute: Whether absolute positions are added to the input.
        conv_width, conv_groups, conv_act: The convolution beside the first layer; width 0 for none.
    """

    span: int = 0
    furthest: int = 0
    logarithmic: bool = False
    kinds: tuple[str, ...] = ()
    share_key: bool = False
    normalize: bool = False
    absolute: bool = True
    conv_width: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What config.json says about a classification head.

    Attributes:
        labels: How many; None where it says nothing.
        id2label: Their names.
        problem_type: regression, single_label_classification or multi_label_classification.
        score_activation: Dotted path of the activation that a sentence-transformers CrossEncoder was saved with.
        pooling: The row of a text, where the family leaves it open: "cls", "bos", "mean" or "late".
        activation: Of the layer before the classifier, where the family leaves it open.
        classifier_from_token: Tokens whose LM-head rows are the classifier.
        method: How they become one.
        is_original_qwen3_reranker: vLLM's name for the second method with Qwen3-Reranker.
        logit_scale: Factor on the LM head's logits.
    """

    labels: int | None = None
    id2label: Mapping[int, str] = field(default_factory=dict)
    problem_type: str | None = None
    score_activation: str | None = None
    pooling: str = "cls"
    activation: str | None = None
    classifier_from_token: tuple[str, ...] = ()
    method: str | None = None
    is_original_qwen3_reranker: bool = False
    logit_scale: float = 1.0


def _label_number(given: object, keys: Keys) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise CheckpointFormatError(
            f"{keys.name}: config.json has id2label with the key {given!r}; its keys are the numbers of the labels"
        ) from None


def _problem_type(keys: Keys) -> str | None:
    given: str | None = keys.get("problem_type", None)
    if given not in (None, *_PROBLEM_TYPES):
        raise CheckpointFormatError(
            f"{keys.name}: config.json has problem_type={given!r}; known: {', '.join(_PROBLEM_TYPES)}"
        )
    return given


def read_head(keys: Keys) -> HeadConfig:
    """What every family writes in the same words."""
    names = {_label_number(i, keys): str(label) for i, label in (keys.get("id2label", None) or {}).items()}
    saved = keys.get("sentence_transformers", None)
    activation = saved.get("activation_fn") if isinstance(saved, Mapping) else None
    named = keys.get("classifier_activation", None)
    scale = keys.get("logits_scaling", None)  # Granite divides by it
    return HeadConfig(
        labels=keys.get("num_labels", None) or len(names) or None,
        id2label=names,
        problem_type=_problem_type(keys),
        score_activation=activation or keys.get("sbert_ce_default_activation_function", None),
        pooling=keys.get("classifier_pooling", "late" if keys.raw.get("model_type") == "eurobert" else "cls"),
        activation=named if isinstance(named, str) else keys.get("pooler_hidden_act", None),
        classifier_from_token=tuple(keys.get("classifier_from_token", None) or ()),
        method=keys.get("method", None),
        is_original_qwen3_reranker=bool(keys.get("is_original_qwen3_reranker", False)),
        logit_scale=1 / scale if scale else keys.get("logit_scale", 1.0),  # Cohere multiplies
    )


def _read_llama(keys: Keys) -> dict[str, Any]:
    return _decoder(keys, attention_bias=keys.get("attention_bias", False), mlp_bias=keys.get("mlp_bias", False))


def _read_mistral(keys: Keys) -> dict[str, Any]:
    window = keys.get("sliding_window", 4096)
    kind = FULL if window is None else SLIDING
    return _decoder(keys, sliding_window=window, layer_types=(kind,) * keys.need("num_hidden_layers"))


def _read_qwen(keys: Keys) -> dict[str, Any]:
    layers = keys.need("num_hidden_layers")
    stated_window = keys.get("sliding_window", 4096)
    window = stated_window if keys.get("use_sliding_window", False) else None
    first_sliding = layers if window is None else keys.get("max_window_layers", 28)
    kinds = keys.get("layer_types", None) or [SLIDING if i >= first_sliding else FULL for i in range(layers)]
    qwen3 = keys.raw["model_type"] == "qwen3"
    return _decoder(
        keys,
        sliding_window=window,
        layer_types=tuple(kinds),
        attention_bias=keys.get("attention_bias", False) if qwen3 else True,
        head_size=keys.get("head_dim", 128) if qwen3 else None,
    )


def _read_gemma(keys: Keys) -> dict[str, Any]:
    return _decoder(keys, **_gemma_common(keys, layers=None))


def _read_gemma2(keys: Keys) -> dict[str, Any]:
    layers = keys.need("num_hidden_layers")
    return _decoder(
        keys,
        **_gemma_common(keys, layers=[SLIDING if i % 2 == 0 else FULL for i in range(layers)]),
        sliding_window=keys.get("sliding_window", 4096),
        attention_softcap=keys.get("attn_logit_softcapping", 50.0),
        final_softcap=keys.get("final_logit_softcapping", 30.0),
        attention_scale=keys.get("query_pre_attn_scalar", 256) ** -0.5,
    )


def _read_gemma3(keys: Keys) -> dict[str, Any]:
    layers = keys.need("num_hidden_layers")
    pattern = keys.get("sliding_window_pattern", None) or keys.raw.get("_sliding_window_pattern", 6)
    common = _gemma_common(keys, layers=[FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)])
    window = keys.get("sliding_window", 4096)
    keys.get("attn_logit_softcapping", None)  # no Gemma 3 has one, and the reference does not apply it
    # A bidirectional Gemma 3 states the whole width of its window: half of it lies on either side.
    return _decoder(
        keys,
        **common,
        sliding_window=window if common["is_causal"] else window // 2 + 1,
        final_softcap=keys.get("final_logit_softcapping", None),
        attention_scale=keys.get("query_pre_attn_scalar", 256) ** -0.5,
        thetas={FULL: 1_000_000.0, SLIDING: keys.get("rope_local_base_freq", 10_000.0)},
    )


def _gemma_common(keys: Keys, *, layers: list[str] | None) -> dict[str, Any]:
    # The released Gemma configs say "gelu" and mean its tanh form.
    act = keys.get("hidden_activation", None) or keys.get("hidden_act", "gelu_pytorch_tanh")
    keys.get("hidden_act", None)
    kinds = (keys.get("layer_types", None) or layers) if layers is not None else None
    return {
        "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act,
        "head_size": keys.get("head_dim", 256),
        "attention_bias": keys.get("attention_bias", False),
        "is_causal": not keys.get("use_bidirectional_attention", None) and keys.get("is_causal", True),
        "tie_word_embeddings": keys.get("tie_word_embeddings", True),
        "pad_token_id": keys.get("pad_token_id", 0),
        **({"layer_types": tuple(kinds)} if kinds is not None else {}),
    }


def _decoder(
    keys: Keys, *, head_size: int | None = None, thetas: Mapping[str, float] | None = None, **family: Any
) -> dict[str, Any]:
    """What all decoder families share; `family` are the fields that one of them sets otherwise."""
    hidden, heads, layers = (keys.need(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    given_head_size = keys.get("head_dim", None)
    size = head_size or given_head_size or hidden // heads
    is_causal = family.pop("is_causal", keys.get("is_causal", True))
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", None) or heads,
        "head_size": size,
        "vocab_size": keys.need("vocab_size"),
        "intermediate_size": keys.need("intermediate_size"),
        "hidden_act": keys.get("hidden_act", "silu"),
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": keys.get("tie_word_embeddings", False),
        "attention_scale": size**-0.5,
        "layer_types": (FULL,) * layers,
        "is_causal": is_causal,
        **family,
    }
    if len(values["layer_types"]) != layers or not {FULL, SLIDING} >= set(values["layer_types"]):
        raise CheckpointFormatError(
            f"{keys.name}: config.json layer_types must name {FULL!r} or {SLIDING!r} for each of {layers} layers"
        )
    # Two-directional sliding windows of decoders other than Gemma 3 are stated inclusively.
    if not is_causal and thetas is None and values.get("sliding_window") is not None:
        values["sliding_window"] += 1
    if SLIDING in values["layer_types"] and values.get("sliding_window") is None:
        raise CheckpointFormatError(f"{keys.name}: config.json has sliding layers and no sliding_window")
    if values["num_heads"] % values["num_kv_heads"]:
        raise CheckpointFormatError(
            f"{keys.name}: config.json has {values['num_heads']} attention heads for {values['num_kv_heads']} of keys"
        )
    positions = keys.need("max_position_embeddings")
    values["rope"] = {kind: _rope(keys, kind, size, positions, thetas) for kind in set(values["layer_types"])}
    values["max_positions"] = max(_stretched(rope) for rope in values["rope"].values())
    return values


def _rope(keys: Keys, kind: str, size: int, positions: int, thetas: Mapping[str, float] | None) -> RopeConfig:
    """The rotary embedding of one kind of layer, from the new `rope_parameters` or the old scattered keys."""
    new, scaling = keys.get("rope_parameters", None), keys.get("rope_scaling", None)
    top_theta = keys.get("rope_theta", None)
    if new is not None and any(isinstance(v, Mapping) for v in new.values()):
        values = dict(new.get(kind) or {})
    elif new is not None:
        values = dict(new)
    else:
        values = dict(scaling or {}) if thetas is None or kind == FULL else {}
    if new is None and top_theta is not None and (thetas is None or kind == FULL):
        values.setdefault("rope_theta", top_theta)
    rope_type = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    rope_type = {"su": "longrope"}.get(rope_type, rope_type)
    if rope_type not in FREQUENCIES:
        raise UnsupportedArchitectureError(
            f"{keys.name}: config.json has rope_type {rope_type!r}; known: {', '.join(FREQUENCIES)}"
        )
    partial = values.pop("partial_rotary_factor", keys.get("partial_rotary_factor", None)) or 1.0
    original = keys.get("original_max_position_embeddings", None)
    fields: dict[str, Any] = {
        "theta": values.pop("rope_theta", None) or (thetas or {}).get(kind, 10_000.0),
        "original_max_positions": original or values.pop("original_max_position_embeddings", None) or positions,
        "short_factor": tuple(values.pop("short_factor", ())),
        "long_factor": tuple(values.pop("long_factor", ())),
    }
    values.pop("original_max_position_embeddings", None)
    known = {f.name for f in dataclasses.fields(RopeConfig)} - set(fields)
    unknown = sorted(set(values) - known)
    if unknown:
        raise CheckpointFormatError(f"{keys.name}: config.json rope parameters have unknown keys {', '.join(unknown)}")
    values = {k: v for k, v in values.items() if v is not None}
    if rope_type in ("linear", "dynamic", "llama3") and "factor" not in values:
        raise CheckpointFormatError(f"{keys.name}: config.json rope_type {rope_type!r} has no factor")
    return RopeConfig(rope_type=rope_type, size=int(size * partial), max_positions=positions, **fields, **values)


def _stretched(rope: RopeConfig) -> int:
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        return max(rope.max_positions, round(rope.original_max_positions * rope.stretch))
    return rope.max_positions


def _read_bert(keys: Keys) -> dict[str, Any]:
    keys.only("position_embedding_type", "absolute")
    keys.only("is_decoder", False)
    keys.only("add_cross_attention", False)
    hidden, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    return {
        "hidden_size": hidden,
        "num_layers": keys.need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": hidden // heads,
        "vocab_size": keys.need("vocab_size"),
        "intermediate_size": keys.need("intermediate_size"),
        "hidden_act": keys.get("hidden_act", "gelu"),
        "norm_eps": keys.get("layer_norm_eps", 1e-12),
        "max_positions": keys.need("max_position_embeddings"),
        "type_vocab_size": keys.get("type_vocab_size", 2),
        "tie_word_embeddings": keys.get("tie_word_embeddings", True),
        "attention_scale": (hidden // heads) ** -0.5,
        "is_causal": False,
    }


def _read_mpnet(keys: Keys) -> dict[str, Any]:
    values = _read_bert(keys)
    # The reference numbers positions from 2, so as many rows of the table are never reached.
    return {
        **values,
        "max_positions": values["max_positions"] - 2,
        "type_vocab_size": 0,
        "relative_buckets": keys.get("relative_attention_num_buckets", 32),
    }


def _read_distilbert(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.get("dim", 768), keys.get("n_heads", 12)
    for key in ("sinusoidal_pos_embds", "tie_word_embeddings"):
        keys.get(key, None)  # the tables are stored whatever these say
    return {
        "hidden_size": hidden,
        "num_layers": keys.get("n_layers", 6),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": hidden // heads,
        "vocab_size": keys.get("vocab_size", 30522),
        "intermediate_size": keys.get("hidden_dim", 4 * 768),
        "hidden_act": keys.get("activation", "gelu"),
        "norm_eps": 1e-12,
        "max_positions": keys.get("max_position_embeddings", 512),
        "tie_word_embeddings": True,
        "attention_scale": (hidden // heads) ** -0.5,
        "is_causal": False,
    }


def _read_modernbert(keys: Keys) -> dict[str, Any]:
    layers, every = keys.need("num_hidden_layers"), keys.get("global_attn_every_n_layers", 3)
    kinds = keys.get("layer_types", None) or [SLIDING if i % every else FULL for i in range(layers)]
    # `local_attention` is the whole width; half of it is seen on either side, that far inclusive.
    thetas = {FULL: keys.get("global_rope_theta", 160_000.0), SLIDING: keys.get("local_rope_theta", 10_000.0)}
    for key in ("rope_theta", "local_rope_theta", "position_embedding_type", "layer_norm_eps", "sliding_window"):
        keys.get(key, None)  # written by earlier versions beside the keys that count
    return {
        **_decoder(
            keys,
            layer_types=tuple(kinds),
            sliding_window=keys.get("local_attention", 128) // 2 + 1,
            hidden_act=keys.get("hidden_activation", "gelu"),
            norm_eps=keys.get("norm_eps", 1e-5),
            attention_bias=keys.get("attention_bias", False),
            mlp_bias=keys.get("mlp_bias", False),
            is_causal=False,
            thetas=thetas,
        ),
        "norm_bias": keys.get("norm_bias", False),
    }


def _read_deberta_v2(keys: Keys) -> dict[str, Any]:
    values = _read_bert(keys)
    values["type_vocab_size"] = keys.get("type_vocab_size", 0)
    values["norm_eps"] = keys.get("layer_norm_eps", 1e-7)
    keys.only("embedding_size", values["hidden_size"])
    kinds = keys.get("pos_att_type", None) or ()
    buckets, furthest = keys.get("position_buckets", -1), keys.get("max_relative_positions", -1)
    furthest = furthest if furthest >= 1 else values["max_positions"]
    relative = keys.get("relative_attention", False)
    normalize = "layer_norm" in [part.strip() for part in keys.get("norm_rel_ebd", "none").lower().split("|")]
    values["disentangled"] = DisentangledConfig(
        span=(buckets if buckets > 0 else furthest) if relative else 0,
        furthest=furthest,
        logarithmic=buckets > 0,
        kinds=tuple(part.strip() for part in kinds.lower().split("|")) if isinstance(kinds, str) else tuple(kinds),
        share_key=keys.get("share_att_key", False),
        normalize=normalize,
        absolute=keys.get("position_biased_input", True),
        conv_width=keys.get("conv_kernel_size", 0),
        conv_groups=keys.get("conv_groups", 1),
        conv_act=keys.get("conv_act", "tanh"),
    )
    return values


def _read_roberta(keys: Keys) -> dict[str, Any]:
    values = _read_bert(keys)
    # Positions start after the padding id, so as many rows of the table are never reached.
    values["max_positions"] -= keys.get("pad_token_id", 1) + 1
    return values


def _read_jina_v3(keys: Keys) -> dict[str, Any]:
    values = _read_bert(keys)
    return {
        **values,
        "norm_eps": keys.get("layer_norm_eps", 1e-5),
        "type_vocab_size": keys.get("type_vocab_size", 1),
        "rope": {FULL: _rope(keys, FULL, values["head_size"], values["max_positions"], {FULL: 20_000.0})},
    }


READERS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen,
    "qwen3": _read_qwen,
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3,
    "bert": _read_bert,
    "roberta": _read_roberta,
    "xlm-roberta": _read_roberta,
    "distilbert": _read_distilbert,
    "mpnet": _read_mpnet,
    "modernbert": _read_modernbert,
    "deberta-v2": _read_deberta_v2,
    "jina_embeddings_v3": _read_jina_v3,
}

# Of these, those that attend causally where nothing else is said.
DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})

DEFAULT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "distilbert": "DistilBertModel",
    "mpnet": "MPNetModel",
    "jina_embeddings_v3": "JinaEmbeddingsV3Model",
    "modernbert": "ModernBertModel",
    "deberta-v2": "DebertaV2Model",
}

"""Published families whose config.json says something else than what runs them: data, by what they are recognised by.

Their authors ship them with code of their own over a backbone that is known here. The tables say what that code does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anypool.config import is_int, is_number
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.pooling.methods import PoolingType

# The tokens of the prompt with the special ones before it; its tokens alone, whatever stands before them; or all but as
# many last tokens as the text has by itself.
SkipRule = Literal["prompt", "bare prompt", "all but text"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's own code does.

    Attributes:
        config: What it does, in keys that are laid over config.json.
        types: Pooling types, where no file says; None for the usual guess.
        normalize: Whether vectors are normalised, where no file says.
        include_prompt: Whether tokens of a prompt take part in pooling, where no file says.
        prompts: Text put before an input, by name.
        default_prompt_name: The prompt used where none is asked for.
        skip_rule: How many leading tokens a prompt that is not pooled takes; see `SkipRule`.
        adds_eos: Whether `eos_token` is put after each text.
        norms_before_cut: Whether embeddings are layer-normalised, without weights, before they are cut.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    types: tuple[PoolingType, ...] | None = None
    normalize: bool | None = None
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    skip_rule: SkipRule = "prompt"
    adds_eos: bool = False
    norms_before_cut: bool = False


def _in_both_directions(model_type: str, model: str) -> Family:
    """A decoder of a known family without the causal mask."""
    return Family(config={"model_type": model_type, "architectures": [model], "is_causal": False})


# LLM2Vec (BehnamGhader et al., arXiv:2404.05961) with its adapters merged, by the name in `architectures`.
_LLM2VEC = {
    name: model_type
    for model_type, stem in (("llama", "Llama"), ("mistral", "Mistral"), ("gemma", "Gemma"), ("qwen2", "Qwen2"))
    for name in (f"{stem}EncoderModel", f"{stem}BiModel", f"{stem}BiForMNTP")
}
_LLM2VEC_CLASSES = {"llama": "LlamaModel", "mistral": "MistralModel", "gemma": "GemmaModel", "qwen2": "Qwen2Model"}
# The models whose texts LLM2Vec puts into their chat format, by `_name_or_path` in config.json.
_LLM2VEC_WRAPPED = (
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.2",
    "meta-llama/Llama-2-7b-chat-hf",
    "google/gemma-2-9b-it",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2-7B-Instruct",
)

# GritLM (Muennighoff et al., arXiv:2402.09906): no window either, and the mean of what follows "<|embed|>\n".
_GRITLM = Family(
    config={**_in_both_directions("mistral", "MistralModel").config, "sliding_window": None},
    types=(PoolingType.MEAN,),
    normalize=True,
    include_prompt=False,
    prompts={"document": "<|embed|>\n"},
    default_prompt_name="document",
)


# What transformers' MistralConfig has where config.json is silent, which writes no defaults for a part of a model.
_MISTRAL_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}


def _nv_embed(raw: Mapping[str, Any], name: str) -> Family:
    """NV-Embed (Lee et al., arXiv:2405.17428). It counts a prompt's tokens without the one that stands before them."""
    text, latent = raw.get("text_config") or {}, raw.get("latent_attention_config") or {}
    if not (isinstance(text, Mapping) and isinstance(latent, Mapping)):
        raise CheckpointFormatError(f"{name}: text_config and latent_attention_config of config.json must be objects")
    own = {"model_type": "mistral", "architectures": ["NVEmbedModel"], "is_causal": False, "sliding_window": None}
    return Family(
        config={**_MISTRAL_DEFAULTS, **text, **own},
        types=(PoolingType.MEAN,),
        normalize=True,
        include_prompt=False,
        skip_rule="bare prompt",
        adds_eos=True,
    )


# Nomic Embed v1.5 (Nussbaum et al., arXiv:2402.01613), whose authors cut a layer-normalised vector.
_NOMIC = Family(norms_before_cut=True)


# transformers' name for jina-embeddings-v3 (Sturua et al., arXiv:2409.10173).
JINA_V3 = "jina_embeddings_v3"


def _jina_v3(raw: Mapping[str, Any], name: str) -> Family:
    """jina-embeddings-v3 as its authors publish it, in whose config.json the tasks and their adapters are named."""
    tasks, rank, alpha = raw.get("lora_adaptations"), raw.get("lora_rank", 4), raw.get("lora_alpha", 1)
    instructions, base = raw.get("task_instructions") or {}, raw.get("rotary_emb_base", 10_000.0)
    problem = None
    if raw.get("position_embedding_type") != "rotary":
        problem = f"position_embedding_type {raw.get('position_embedding_type')!r}; supported: 'rotary'"
    elif raw.get("emb_pooler") not in (None, "mean"):
        problem = f"emb_pooler {raw['emb_pooler']!r}; supported: 'mean'"
    elif tasks is not None and not (
        isinstance(tasks, list) and tasks and all(isinstance(task, str) and task for task in tasks)
    ):
        problem = f"lora_adaptations {tasks!r}, not names of tasks"
    elif len(set(tasks or ())) != len(tasks or ()):
        problem = f"lora_adaptations {tasks!r}, where a name comes twice"
    elif not (is_int(rank) and rank > 0 and is_number(alpha) and is_number(base) and base > 0):
        problem = (
            f"lora_rank {rank!r}, lora_alpha {alpha!r} and rotary_emb_base {base!r}; they must be positive numbers"
        )
    elif not (isinstance(instructions, Mapping) and all(isinstance(text, str) for text in instructions.values())):
        problem = f"task_instructions {instructions!r:.80}, not texts by task"
    if problem is not None:
        raise UnsupportedArchitectureError(f"{name}: config.json of a jina-embeddings-v3 has {problem}")
    rope = {"rope_type": "default", "rope_theta": float(base)}
    own = {
        "model_type": JINA_V3,
        "architectures": ["JinaEmbeddingsV3Model"],
        "rope_parameters": rope,
        "position_embedding_type": None,  # said by the line before
        "lora_rank": rank,
        "lora_alpha": alpha,
    }
    return Family(config=own, types=(PoolingType.MEAN,), normalize=True)


# What no backbone with a pooler can give, by the name in `architectures` or of the class in `auto_map`.
_REFUSED = {
    "JinaForRanking": "it scores all documents of a list in one prompt (jina-reranker-v3)",
}


def _own_code(raw: Mapping[str, Any]) -> Mapping[str, str]:
    """Where the code is that comes with a checkpoint, by the class that it stands for."""
    given = raw.get("auto_map")
    return {key: str(place) for key, place in given.items()} if isinstance(given, Mapping) else {}


def find_family(
    raw: Mapping[str, Any], llm2vec: Mapping[str, Any] | None, *, name: str, trust_remote_code: bool
) -> Family | None:
    """The family of a checkpoint; None for most, and where its own code runs otherwise.

    Args:
        raw: Its config.json.
        llm2vec: Its llm2vec_config.json, where there is one.
        name: Of the model, for messages.
        trust_remote_code: Whether its own code runs.

    Raises:
        UnsupportedArchitectureError: It is of a family that is known and not supported.
    """
    own_code, listed = _own_code(raw), raw.get("architectures")
    architectures = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    classes = {*architectures, *(place.rsplit(".", 1)[-1] for place in own_code.values())}
    for refused in sorted(classes & set(_REFUSED)):
        raise UnsupportedArchitectureError(f"{name}: {refused} is not supported: {_REFUSED[refused]}")
    if raw.get("model_type") == "nomic_bert":
        return _NOMIC
    if "XLMRobertaLoRA" in classes:
        return _jina_v3(raw, name)
    if trust_remote_code and own_code:
        return None
    [architecture, *_] = architectures or [""]
    if architecture == "GritLM" or any("modeling_gritlm" in place for place in own_code.values()):
        return _GRITLM
    if architecture == "NVEmbedModel":
        return _nv_embed(raw, name)
    if architecture == "LlamaBidirectionalModel":  # of NVIDIA
        return _in_both_directions("llama", "LlamaModel")
    if llm2vec is not None or architecture in _LLM2VEC:
        return _llm2vec(raw, llm2vec or {}, architecture, name)
    return None


def _llm2vec(raw: Mapping[str, Any], settings: Mapping[str, Any], architecture: str, name: str) -> Family:
    model_type = _LLM2VEC.get(architecture) or str(raw.get("model_type"))
    mode, base = settings.get("pooling_mode", "mean"), raw.get("_name_or_path")
    problem = None
    if model_type not in _LLM2VEC_CLASSES:
        problem = f"has model_type {model_type!r}; supported: {', '.join(_LLM2VEC_CLASSES)}"
    elif mode != "mean":
        problem = f"has pooling_mode {mode!r} in llm2vec_config.json; supported: 'mean'"
    elif base in _LLM2VEC_WRAPPED:
        problem = (
            f"was made of {base}, whose chat format LLM2Vec puts around each text, which is not supported; "
            "hf_overrides={'_name_or_path': ''} leaves that out, and gives other vectors than LLM2Vec"
        )
    if problem is not None:
        raise UnsupportedArchitectureError(f"{name} is a model of LLM2Vec, and {problem}")
    both = _in_both_directions(model_type, _LLM2VEC_CLASSES[model_type])
    return replace(both, types=(PoolingType.MEAN,), normalize=False, include_prompt=False, skip_rule="all but text")


# How the nomic_bert checkpoints name what transformers names otherwise.
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
# What those checkpoints may say that transformers' class cannot do otherwise.
_NOMIC_ONLY = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}


def translate(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """config.json in the words of transformers, for families that were published in words of their own.

    Raises:
        UnsupportedArchitectureError: It says something that transformers' class does not do.
    """
    if raw.get("model_type") != "nomic_bert" or "n_embd" not in raw:
        return raw
    for key, only in _NOMIC_ONLY.items():
        if raw.get(key) not in (only, None):
            raise UnsupportedArchitectureError(
                f"{name}: config.json has {key}={raw[key]!r}; only {only!r} is supported for nomic_bert. Its own code "
                "may do that: pass trust_remote_code=True if you trust it"
            )
    rope = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base") or 10_000}
    kept = {key: value for key, value in raw.items() if key not in {*_NOMIC_NAMES, *_NOMIC_ONLY, "auto_map"}}
    renamed = {theirs: raw[ours] for ours, theirs in _NOMIC_NAMES.items() if ours in raw}
    return {**kept, **renamed, "hidden_act": "silu", "rope_parameters": rope}


def refuse_unknown_attention(raw: Mapping[str, Any], name: str) -> None:
    """Refuses a decoder made for embeddings whose own code decides which way it attends, where no key says that."""
    own_code = _own_code(raw)
    if "AutoModel" not in own_code or any(key in raw for key in ("is_causal", "use_bidirectional_attention")):
        return
    raise UnsupportedArchitectureError(
        f"{name} is an embedding model with code of its own ({own_code['AutoModel']}), and config.json does not say "
        "whether it attends in both directions. Pass trust_remote_code=True if you trust that code, or say it: "
        "hf_overrides={'is_causal': False} for both directions (stella, gte-Qwen2), True for a causal mask"
    )

"""Adapters that peft writes give peft's own numbers, request by request and merged."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModel, AutoModelForCausalLM

from tests.adapters.lora_checkpoints import adapter, assert_as_peft, base, request
from tests.helpers import loaded

DECODER = ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What is trained, by name: the family, the class that peft wraps, and the adapter's configuration.
ADAPTERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", AutoModelForCausalLM, {"target_modules": DECODER}),
    "llama-bare": ("llama", AutoModel, {"target_modules": "all-linear"}),
    "llama-pattern": (
        "llama",
        AutoModelForCausalLM,
        {
            "target_modules": r".*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.up_proj)",
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 3},
            "use_rslora": True,
        },
    ),
    "llama-one-layer": ("llama", AutoModelForCausalLM, {"target_modules": ["v_proj"], "layers_to_transform": [1]}),
    "llama-lm-head": ("llama", AutoModelForCausalLM, {"target_modules": ["v_proj", "lm_head"]}),
    "llama-bias": ("llama", AutoModelForCausalLM, {"target_modules": ["q_proj", "up_proj"], "lora_bias": True}),
    "llama-table": ("llama", AutoModelForCausalLM, {"target_modules": ["q_proj", "embed_tokens"]}),
    "llama-whole-table": (
        "llama",
        AutoModelForCausalLM,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "llama-tokens": (
        "llama",
        AutoModelForCausalLM,
        {"target_modules": ["q_proj"], "trainable_token_indices": [118, 1, 103]},
    ),
    "qwen3": ("qwen3", AutoModelForCausalLM, {"target_modules": DECODER}),
    "gemma3": ("gemma3", AutoModelForCausalLM, {"target_modules": [*DECODER, "embed_tokens"]}),
    "gpt2": ("gpt2", AutoModelForCausalLM, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2-bare": (
        "gpt2",
        AutoModel,
        {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True, "trainable_token_indices": None},
    ),
    "bert": ("bert", AutoModel, {"target_modules": ["query", "value", "dense"]}),
    "bert-table": ("bert", AutoModel, {"target_modules": ["query", "word_embeddings"]}),
    "bert-tokens": (
        "bert",
        AutoModel,
        {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": [5, 9]}},
    ),
    "bert-lora-bias": ("bert", AutoModel, {"target_modules": ["key", "dense"], "bias": "lora_only"}),
    "modernbert": ("modernbert", AutoModel, {"target_modules": ["Wqkv", "Wi", "Wo"]}),
}
# These change what can only be merged.
MERGED_ONLY: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dora": ("llama", AutoModelForCausalLM, {"target_modules": DECODER, "use_dora": True}),
    "dora-gpt2": (
        "gpt2",
        AutoModelForCausalLM,
        {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "norms": ("bert", AutoModel, {"target_modules": ["query"], "bias": "all"}),
    "whole-layer": (
        "llama",
        AutoModelForCausalLM,
        {"target_modules": ["q_proj"], "modules_to_save": ["v_proj", "norm"]},
    ),
    "whole-turned": (
        "gpt2",
        AutoModelForCausalLM,
        {"target_modules": ["c_attn"], "modules_to_save": ["c_proj"], "fan_in_fan_out": True},
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_request_gets_what_peft_gives(name: str) -> None:
    family, cls, config = ADAPTERS[name]
    folder, trained = adapter(base(family), cls=cls, **config)
    with loaded(base(family), enable_lora=True) as llm:
        assert_as_peft(llm, trained, request(folder))
        assert_as_peft(llm, AutoModel.from_pretrained(base(family)))


@pytest.mark.parametrize("name", ADAPTERS | MERGED_ONLY)
def test_a_merged_adapter_gives_what_peft_gives(name: str) -> None:
    family, cls, config = (ADAPTERS | MERGED_ONLY)[name]
    folder, trained = adapter(base(family), cls=cls, **config)
    with loaded(base(family), lora=str(folder)) as llm:
        assert_as_peft(llm, trained)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_an_adapters_folder_is_a_model(name: str) -> None:
    family, cls, config = ADAPTERS[name]
    folder, trained = adapter(base(family), cls=cls, **config)
    with loaded(folder) as llm:
        assert_as_peft(llm, trained)


@pytest.mark.parametrize("name", ["llama", "llama-table", "bert", "modernbert"])
def test_the_transformers_backend_gives_what_peft_gives(name: str) -> None:
    family, cls, config = ADAPTERS[name]
    folder, trained = adapter(base(family), cls=cls, **config)
    with loaded(base(family), enable_lora=True, model_impl="transformers") as llm:
        assert_as_peft(llm, trained, request(folder))
    with loaded(base(family), lora=str(folder), model_impl="transformers") as llm:
        assert_as_peft(llm, trained)

"""Adapters that peft writes give peft's own numbers, request by request and merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, Qwen2VLForConditionalGeneration, T5EncoderModel

from anypool import LLM
from anypool.errors import ConfigError, WeightsError
from tests.adapters.lora_checkpoints import adapter, assert_as_peft, base, request
from tests.helpers import loaded, new_folder, wordpiece_tokenizer
from tests.multimodal.checkpoints import clip_folder, picture, qwen2_vl_folder

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
    "albert": ("albert", AutoModel, {"target_modules": ["query", "ffn", "word_embeddings"]}),
    "deberta": ("deberta", AutoModel, {"target_modules": ["query_proj", "key_proj", "dense"]}),
    "mixtral": ("mixtral", AutoModelForCausalLM, {"target_modules": ["q_proj", "o_proj"]}),
    "opt": ("opt", AutoModelForCausalLM, {"target_modules": ["q_proj", "fc1", "embed_tokens"]}),
    "t5": ("t5", T5EncoderModel, {"target_modules": ["q", "wo"]}),
    "xlm-roberta": ("xlm-roberta", AutoModel, {"target_modules": "all-linear"}),
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
        assert_as_peft(llm, (cls if family == "t5" else AutoModel).from_pretrained(base(family)))


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


def test_a_model_that_reads_images_takes_adapters_of_its_language_model() -> None:
    targets = r".*language_model.*\.(q_proj|up_proj)"
    folder, trained = adapter(qwen2_vl_folder(), cls=Qwen2VLForConditionalGeneration, target_modules=targets)
    with loaded(qwen2_vl_folder(), enable_lora=True) as llm:
        assert_as_peft(llm, trained, request(folder))
    eyes, _ = adapter(qwen2_vl_folder(), cls=Qwen2VLForConditionalGeneration, target_modules=r".*visual.*\.qkv")
    with (
        loaded(qwen2_vl_folder(), enable_lora=True) as llm,
        pytest.raises(WeightsError, match=r"visual.* has no place"),
    ):
        llm.embed("cat", lora_request=request(eyes), use_tqdm=False)


def test_a_clip_takes_adapters() -> None:
    folder, trained = adapter(clip_folder(), target_modules=["q_proj", "fc1", "visual_projection"])
    with loaded(clip_folder(), enable_lora=True) as llm:
        prompts = ["the cat", {"multi_modal_data": {"image": picture(1)}}]
        text, image = llm.embed(prompts, lora_request=request(folder), use_tqdm=False)
        _, plain = llm.embed(prompts, use_tqdm=False)
    with torch.no_grad():
        found = trained.get_text_features(input_ids=torch.tensor([text.prompt_token_ids])).pooler_output[0]
    torch.testing.assert_close(text.outputs.data, F.normalize(found, dim=-1), atol=1e-5, rtol=0)
    assert (image.outputs.data - plain.outputs.data).abs().max() > 0.01


def test_a_model_without_linear_layers_takes_no_adapters() -> None:
    folder = new_folder("table")
    save_file({"embeddings": torch.randn(len(wordpiece_tokenizer()), 8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "model2vec", "normalize": true}')
    wordpiece_tokenizer().save_pretrained(folder)
    with pytest.raises(ConfigError, match="no linear layers"):
        LLM(folder, enable_lora=True, device="cpu", use_tqdm_on_load=False)

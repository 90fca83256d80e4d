"""Architectures without a native class equal transformers through the Transformers backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from anypool.errors import WeightsError
from anypool.model_executor.models.transformers_backend import Way
from anypool.model_executor.packed_batch import PackedBatch
from tests.models.parity import CPU, load, packed_states, random_ids, reference_states, run, save_random

COMMON = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**COMMON, "num_key_value_heads": 2}
GPT = {
    "vocab_size": 120,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Causal LMs.
    "apertus": ("ApertusForCausalLM", "ApertusConfig", GQA),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", GQA),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", COMMON),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", GQA),
    "cohere": ("CohereForCausalLM", "CohereConfig", GQA),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**GQA, "sliding_window": 20}),
    "cwm": ("CwmForCausalLM", "CwmConfig", {**GQA, "head_dim": 8, "sliding_window": 20}),
    "diffllama": ("DiffLlamaForCausalLM", "DiffLlamaConfig", GQA),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**GQA, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**GQA, "head_dim": 8}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**GQA, "sliding_window": 20, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**MOE, "head_dim": 8, "sliding_window": 20}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {**GQA, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MOE, "sliding_window": None}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {**GQA, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GQA),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", MOE),
    "opt": ("OPTForCausalLM", "OPTConfig", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("PhiForCausalLM", "PhiConfig", COMMON),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "sliding_window": 20}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "head_dim": 8}),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {**GQA, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {**GQA, "num_hidden_layers": 4}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GQA),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**GQA, "sliding_window": 20}),
    # The same families as the native ones, to compare the two ways in.
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GQA, "head_dim": 8, "sliding_window": 20}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GQA, "head_dim": 8, "sliding_window": 20}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 8}),
    # Encoders.
    "albert": ("AlbertModel", "AlbertConfig", {**COMMON, "embedding_size": 16}),
    "bert": ("BertModel", "BertConfig", COMMON),
    "camembert": ("CamembertModel", "CamembertConfig", {**COMMON, "pad_token_id": 1}),
    "data2vec-text": ("Data2VecTextModel", "Data2VecTextConfig", {**COMMON, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 120, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 160},
    ),
    "electra": ("ElectraModel", "ElectraConfig", {**COMMON, "embedding_size": 16}),
    "ernie": ("ErnieModel", "ErnieConfig", COMMON),
    "eurobert": ("EuroBertModel", "EuroBertConfig", GQA),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**COMMON, "local_attention": 24, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "roberta": ("RobertaModel", "RobertaConfig", {**COMMON, "pad_token_id": 1}),
}


def save(name: str, folder: Path) -> Any:
    model_name, config_name, values = CASES[name]
    config = getattr(hf, config_name)(**values)
    torch.manual_seed(0)
    model = getattr(hf, model_name)._from_config(config, attn_implementation="eager")
    save_random(model, folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_packed_equals_unpacked(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    texts = random_ids(120)
    ours = load(tmp_path, model_impl="transformers")
    assert ours.way is Way.PACKED
    actual = run(ours, PackedBatch.pack(texts, device=CPU))
    torch.testing.assert_close(actual, reference_states(model, texts), atol=1e-5, rtol=0)


def test_the_probe_notices_positions_that_do_not_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 with packed positions counted through the whole batch must not pass."""
    from anypool.model_executor.models.transformers_backend import TransformersModel

    forward = TransformersModel.forward

    def broken(self: Any, ids: torch.Tensor, positions: torch.Tensor, attn: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, ids, torch.arange(len(positions)), attn, **kwargs)

    save("gpt2", tmp_path)
    monkeypatch.setattr(TransformersModel, "forward", broken)
    model = load(tmp_path)
    assert model.way is Way.PADDED
    assert model.rejected[0].startswith("packed batches: hidden states differ by")


def test_is_causal_false_turns_a_causal_lm_bidirectional(tmp_path: Path) -> None:
    save("granite", tmp_path)
    texts = random_ids(120)
    model = hf.GraniteForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model.config.is_causal = False
    actual = packed_states(tmp_path, texts, hf_overrides={"is_causal": False})
    torch.testing.assert_close(actual, reference_states(model.eval(), texts), atol=1e-5, rtol=0)


def test_native_and_transformers_give_the_same(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    texts = random_ids(120)
    native, through = (packed_states(tmp_path, texts, model_impl=impl) for impl in ("native", "transformers"))
    torch.testing.assert_close(native, through, atol=1e-5, rtol=0)


def test_a_long_text_leaves_the_longrope_frequencies_of_short_ones_alone(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    config = hf.Phi3Config(**{**GQA, "rope_parameters": longrope, "original_max_position_embeddings": 64})
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120, (7, 130, 64, 1, 65))
    expected = reference_states(model, texts)
    for batch in (texts, texts[:1] + texts[2:4], [texts[1], texts[4]]):
        places = [texts.index(ids) for ids in batch]
        states = expected.split([len(ids) for ids in texts])
        torch.testing.assert_close(
            packed_states(tmp_path, batch), torch.cat([states[i] for i in places]), atol=1e-5, rtol=0
        )


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    tensors["transformer.h.9.extra"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing: h\.1\.mlp\.c_fc\.weight.*no place in the model: .*h\.9\.extra"):
        packed_states(tmp_path, [[5, 6]])


def test_the_lm_head_is_not_loaded(tmp_path: Path) -> None:
    from anypool.adapters.load import load_pooling_model
    from anypool.config import EngineConfig

    model = save("phi3", tmp_path)
    assert "lm_head.weight" in model.state_dict()
    loaded = load_pooling_model(EngineConfig(model=str(tmp_path), use_tqdm_on_load=False))
    large = [name for name, p in loaded.model.named_parameters() if p.shape == model.lm_head.weight.shape]
    assert large == ["model.embed_tokens.weight"]
    assert loaded.model.lm_head is None

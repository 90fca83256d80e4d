"""Native families equal transformers on tiny random checkpoints that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.model_executor.packed_batch import PackedBatch
from tests.models.parity import LENGTHS, packed_states, random_ids, reference_states, save_random

DECODER = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
ENCODER = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
LONG = [1.5 + i / 4 for i in range(4)]
SHORT = [1.0 + i / 8 for i in range(4)]
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **values}}


DECODERS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "llama-bias": (hf.LlamaForCausalLM, hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (hf.LlamaForCausalLM, hf.LlamaConfig, HEAD),
    "llama-mha-tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-linear": (hf.LlamaForCausalLM, hf.LlamaConfig, rope("linear", factor=4.0)),
    "llama-dynamic": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {**rope("dynamic", factor=4.0), "max_position_embeddings": 64},
    ),
    "llama-llama3": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": (hf.LlamaForCausalLM, hf.LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7, truncate=False),
    ),
    "llama-longrope": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        rope("longrope", long_factor=LONG, short_factor=SHORT, original_max_position_embeddings=64, factor=4.0),
    ),
    "llama-bidirectional": (hf.LlamaForCausalLM, hf.LlamaConfig, {"is_causal": False}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 20}),
    "mistral-sliding-bidirectional": (
        hf.MistralForCausalLM,
        hf.MistralConfig,
        {"sliding_window": 20, "is_causal": False},
    ),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}),
    "qwen2-sliding": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-bidirectional": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"is_causal": False}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, HEAD),
    "qwen3-bias": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**HEAD, "attention_bias": True}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, HEAD),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**HEAD, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {**HEAD, "sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "gemma3-linear-rope": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {**HEAD, "sliding_window": 20, "sliding_window_pattern": 3, "rope_parameters": GEMMA_ROPE},
    ),
    "gemma3-bidirectional": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {**HEAD, "sliding_window": 20, "sliding_window_pattern": 3, "use_bidirectional_attention": True},
    ),
    "gemma3-softcap": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {**HEAD, "sliding_window": 20, "attn_logit_softcapping": 5.0},
    ),
}

ENCODERS = {
    "bert": (hf.BertModel, hf.BertConfig, {}),
    "bert-masked-lm": (hf.BertForMaskedLM, hf.BertConfig, {}),
    "bert-gelu-new": (hf.BertModel, hf.BertConfig, {"hidden_act": "gelu_new"}),
    "roberta": (hf.RobertaModel, hf.RobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": (hf.XLMRobertaModel, hf.XLMRobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": (
        hf.DistilBertModel,
        hf.DistilBertConfig,
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 120},
    ),
    "mpnet": (hf.MPNetModel, hf.MPNetConfig, {"pad_token_id": 1}),
    "modernbert": (
        hf.ModernBertModel,
        hf.ModernBertConfig,
        {
            "local_attention": 24,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "modernbert-biases": (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "deberta-v3": (
        hf.DebertaV2Model,
        hf.DebertaV2Config,
        {
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
        },
    ),
    "deberta-v2-own-projections": (
        hf.DebertaV2Model,
        hf.DebertaV2Config,
        {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 40,
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2-c2p": (
        hf.DebertaV2Model,
        hf.DebertaV2Config,
        {"relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 16, "share_att_key": True},
    ),
    "deberta-v2-conv": (
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2Config,
        {
            "relative_attention": True,
            "position_buckets": 16,
            "pos_att_type": "p2c|c2p",
            "share_att_key": True,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
    ),
    "deberta-v2-absolute": (hf.DebertaV2Model, hf.DebertaV2Config, {}),
    "xlm-roberta-masked-lm": (hf.XLMRobertaForMaskedLM, hf.XLMRobertaConfig, {"pad_token_id": 1}),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    model_cls, config_cls, changes = DECODERS[name]
    model = model_cls._from_config(config_cls(**{**DECODER, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(DECODER["vocab_size"])
    if name in ("llama-dynamic", "llama-longrope"):  # their modules remember lengths: each text gets a fresh one
        fresh = [model_cls.from_pretrained(tmp_path, attn_implementation="eager") for _ in texts]
        expected = torch.cat([reference_states(m, [text]) for m, text in zip(fresh, texts, strict=True)])
    else:
        expected = reference_states(model, texts)
    torch.testing.assert_close(packed_states(tmp_path, texts), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_equals_transformers(name: str, tmp_path: Path) -> None:
    model_cls, config_cls, changes = ENCODERS[name]
    model = model_cls._from_config(config_cls(**{**ENCODER, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(ENCODER["vocab_size"])
    torch.testing.assert_close(packed_states(tmp_path, texts), reference_states(model, texts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "mpnet", "bert"])
def test_padding_tokens_inside_a_text_equal_transformers(name: str, impl: str, tmp_path: Path) -> None:
    if (name, impl) == ("mpnet", "transformers"):
        pytest.skip("its attention does not go through transformers' interface")
    model_cls, config_cls, changes = ENCODERS[name]
    model = model_cls._from_config(config_cls(**{**ENCODER, **changes}), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = [[5, 1, 6, 0, 7], [1, 1, 9], [8, 9, 1], [5, 6]]
    actual = packed_states(tmp_path, texts, model_impl=impl)
    torch.testing.assert_close(actual, reference_states(model, texts), atol=1e-5, rtol=0)


def test_bert_token_types_equal_transformers(tmp_path: Path) -> None:
    model = hf.BertModel(hf.BertConfig(**ENCODER))
    save_random(model, tmp_path)
    texts = random_ids(ENCODER["vocab_size"])
    types = [[int(i >= len(ids) // 2) for i in range(len(ids))] for ids in texts]
    with torch.inference_mode():
        expected = torch.cat(
            [
                model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).last_hidden_state[0]
                for ids, kinds in zip(texts, types, strict=True)
            ]
        )
        loaded = load_pooling_model(EngineConfig(model=str(tmp_path), use_tqdm_on_load=False, device="cpu"))
        batch = PackedBatch.pack(texts, device=loaded.device, token_types=types)
        actual = loaded.model(batch.input_ids_T, batch.positions_T, batch.attn, token_type_ids_T=batch.token_type_ids_T)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "bert", "xlm-roberta"])
def test_a_text_alone_equals_the_text_in_a_batch(name: str, tmp_path: Path) -> None:
    model_cls, config_cls, changes = {**DECODERS, **ENCODERS}[name]
    sizes = DECODER if name in DECODERS else ENCODER
    save_random(model_cls(config_cls(**{**sizes, **changes})), tmp_path)
    texts = random_ids(120)
    together = packed_states(tmp_path, texts).split(LENGTHS)
    for text, expected in zip(texts, together, strict=True):
        torch.testing.assert_close(packed_states(tmp_path, [text]), expected, atol=5e-6, rtol=0)


def test_old_rope_keys_equal_new_ones(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling`, as every checkpoint before transformers 5 has them."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(**DECODER, **rope("yarn", factor=4.0, original_max_position_embeddings=64))
    )
    save_random(model, tmp_path)
    texts = random_ids(120)
    new = packed_states(tmp_path, texts)
    old = packed_states(
        tmp_path, texts, hf_overrides={"rope_parameters": None, "rope_theta": 10_000.0, "rope_scaling": scaling}
    )
    assert torch.equal(new, old)


def test_bare_and_prefixed_checkpoints_give_the_same(tmp_path: Path) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))
    save_random(model, tmp_path / "lm")
    model.model.save_pretrained(tmp_path / "bare")
    texts = random_ids(120)
    assert torch.equal(packed_states(tmp_path / "lm", texts), packed_states(tmp_path / "bare", texts))


def test_logits_of_the_causal_lm_class_equal_transformers(tmp_path: Path) -> None:
    """`compute_logits` of the class that the adapter subclasses, with a tied head and a soft-cap."""
    from anypool.model_executor.model_config import ModelConfig
    from anypool.model_executor.models.gemma import Gemma2ForCausalLM
    from anypool.model_executor.models.interfaces import load_backbone
    from anypool.model_executor.weights.checkpoint import open_checkpoint
    from anypool.model_executor.weights.loading import construct
    from anypool.model_executor.weights.repository import Repository

    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, **HEAD))
    save_random(model, tmp_path)
    repository = Repository.open(str(tmp_path))
    config = ModelConfig.from_pretrained(repository)
    ours = construct(lambda: Gemma2ForCausalLM(config))
    load_backbone(ours, open_checkpoint(repository), name="tiny", device=torch.device("cpu"), dtype=torch.float32)
    [ids] = random_ids(120, (9,))
    batch = PackedBatch.pack([ids], device=torch.device("cpu"))
    with torch.inference_mode():
        logits = ours.compute_logits(ours(batch.input_ids_T, batch.positions_T, batch.attn))
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

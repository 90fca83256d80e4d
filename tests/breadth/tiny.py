"""Tiny configurations of any architecture: the sizes that configurations have in common, made small."""

from __future__ import annotations

import dataclasses
from typing import Any

# Field of a configuration -> value. Only those that a class has are set.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "src_vocab_size", "tgt_vocab_size", "entity_vocab_size"), 120),
    **dict.fromkeys(("vocab_size_per_layer_input", "xpath_unit_hidden_size"), 120),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim", "attention_hidden_size"), 32
    ),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "width", "model_dim", "dim_model"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "entity_emb_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "d_inner", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "ffn_hidden_size", "feed_forward_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "attention_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "dim_per_head"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 120),
    **dict.fromkeys(("mamba_n_heads", "num_mamba_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_head_dim", "mamba_d_head"), 16),
    "rotary_dim": 4,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(config_cls: Any, overrides: dict[str, Any]) -> Any:
    """A configuration with small sizes.

    Args:
        config_cls: A configuration class of transformers.
        overrides: Fields that this family needs otherwise; None leaves a field as it is by default.
    """
    fields = {field.name for field in dataclasses.fields(config_cls)}
    chosen = {name: value for name, value in {**SIZES, **overrides}.items() if name in fields or name in overrides}
    if "qk_rope_head_dim" in fields and "num_key_value_heads" not in overrides:
        chosen["num_key_value_heads"] = chosen.get("num_attention_heads", 4)  # latent attention shares no heads
    left = {name for name, value in overrides.items() if value is None}
    return config_cls(**{name: value for name, value in chosen.items() if name not in left})

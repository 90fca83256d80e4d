"""What single families need beside the common sizes, and architectures of the mappings that are no text models."""

from __future__ import annotations

from typing import Any

T5GEMMA = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "head_dim": None,
}
FOUR_LAYERS = {"num_hidden_layers": 4}  # of which the last attends
# Model type or architecture -> fields of its configuration; None leaves a common size at its default.
OVERRIDES: dict[str, dict[str, Any]] = {
    "canine": {"num_hash_buckets": 64, "downsampling_rate": 4, "local_transformer_stride": 16},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for name in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "funnel": {"block_sizes": [1, 1, 1], "num_decoder_layers": 1, "n_head": 4, "d_head": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "inkling2_loop_text": {"unpadded_vocab_size": 120},
    "inkling2_text": {"unpadded_vocab_size": 120},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mistral4": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
    },
    "t5gemma": {"encoder": T5GEMMA, "decoder": T5GEMMA},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "kimi_linear": FOUR_LAYERS,
    "olmo_hybrid": FOUR_LAYERS,
    "qwen3_5_moe_text": FOUR_LAYERS,
    "qwen3_5_text": FOUR_LAYERS,
    "qwen3_next": FOUR_LAYERS,
    "qwen4_exp_text": FOUR_LAYERS,
    "ReformerModelWithLMHead": {"is_decoder": True},
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}

# Model type or architecture -> what it reads, beside text or in its place.
NOT_TEXT: dict[str, str] = {
    "bros": "words with their places on a page",
    "encoder-decoder": "what its two models read",
    "fuyu": "images",
    "gemma3": "images",
    "gemma3n": "images and sound",
    "gemma4": "images and sound",
    "gemma4_unified": "images and sound",
    "gemma4_assistant": "hidden states of another model",
    "gemma4_unified_assistant": "hidden states of another model",
    "git": "images",
    "got_ocr2": "images",
    "layoutlmv2": "images of pages",
    "layoutlmv3": "images of pages",
    "lilt": "words with their places on a page",
    "markuplm": "nodes of a web page",
    "modernvbert": "images",
    "moshi": "sound",
    "moss_transcribe_diarize": "sound",
    "musicgen": "sound",
    "musicgen_melody": "sound",
    "perceiver": "anything, into an array of its own length",
    "phi4_multimodal": "images and sound",
    "qwen3_asr": "sound",
    "Qwen3_5ForSequenceClassification": "images",
    "Qwen3_5ForTokenClassification": "images",
    "t5gemma2": "images",
    "trocr": "images",
    "ultravbert": "images",
    "whisper": "sound",
}

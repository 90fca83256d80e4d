"""config.json, key by key: what each value must be, and which keys nobody here knows.

A key that no reader asks for is reported once, so that nothing a checkpoint says is dropped in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError

logger = logging.getLogger(__name__)

# Keys that say nothing about inference, or repeat what a class already fixes.
_IRRELEVANT = frozenset(
    "_attn_implementation _name_or_path _sliding_window_pattern adapters architectures attention_dropout "
    "attention_probs_dropout_prob auto_map bos_token_id cache_implementation chunk_size_feed_forward "
    "classifier_bias classifier_dropout cls_token_id decoder_bias "
    "deterministic_flash_attn directionality dropout dtype embedding_dropout eos_token_id finetuning_task "
    "gradient_checkpointing hidden_dropout hidden_dropout_prob initializer_cutoff_factor initializer_range "
    "is_encoder_decoder is_matryoshka label2id legacy matryoshka_dimensions max_window_layers mlp_dropout "
    "model_max_length model_type name_or_path output_attentions output_hidden_states output_past "
    "pooler_dropout pooler_fc_size pooler_hidden_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type prefix pretraining_tp pruned_heads qa_dropout "
    "reference_compile repad_logits_with_grad return_dict sep_token_id seq_classif_dropout "
    "sparse_pred_ignore_index sparse_prediction task_specific_params tie_weights_ torch_dtype torchscript "
    "transformers_version use_bfloat16 use_cache "
    # of jina-embeddings-v3, whose family says what it does, or about training
    "emb_pooler load_trained_adapters lora_adaptations lora_alpha lora_dropout_p lora_main_params_trainable lora_rank "
    "rotary_emb_base task_instructions truncate_dim use_flash_attn use_reentrant "
    # of NV-Embed, whose family says what it does
    "add_eos add_pad_token is_mask_instruction latent_attention_config mask_type padding_side text_config".split()
)


# What values must be, by key: sizes are integers from 1 on. A key of which `null` has a meaning may also be that.
_SIZES = frozenset(
    "conv_groups dim global_attn_every_n_layers head_dim hidden_dim hidden_size intermediate_size local_attention "
    "max_position_embeddings max_window_layers n_heads n_layers num_attention_heads num_hidden_layers "
    "num_key_value_heads num_labels original_max_position_embeddings relative_attention_num_buckets sliding_window "
    "sliding_window_pattern vocab_size".split()
)
_INTEGERS = frozenset("conv_kernel_size max_relative_positions pad_token_id position_buckets type_vocab_size".split())
_NUMBERS = frozenset(
    "attn_logit_softcapping final_logit_softcapping global_rope_theta layer_norm_eps local_rope_theta logit_scale "
    "logits_scaling norm_eps partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope_local_base_freq "
    "rope_theta".split()
)
_FLAGS = frozenset(
    "attention_bias is_causal is_original_qwen3_reranker mlp_bias norm_bias position_biased_input relative_attention "
    "share_att_key tie_word_embeddings use_bidirectional_attention use_sliding_window".split()
)
_TEXTS = frozenset(
    "classifier_activation classifier_pooling conv_act hidden_act hidden_activation activation method norm_rel_ebd "
    "pooler_hidden_act problem_type sbert_ce_default_activation_function".split()
)
_TABLES = frozenset("id2label rope_parameters rope_scaling".split())
_LARGEST = 10**9
_MOST_LAYERS = 10_000


def _is_right(key: str, value: Any) -> tuple[bool, str]:
    """Whether a key's value is what it must be, and what that is."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    integer = number and isinstance(value, int)
    if key in _SIZES:
        most = _MOST_LAYERS if key in ("num_hidden_layers", "n_layers") else _LARGEST
        return integer and 1 <= value <= most, f"an integer from 1 to {most:,}"
    if key in _INTEGERS:
        return integer and abs(value) <= _LARGEST, "an integer"
    if key in _NUMBERS:
        return number and 0 < value < float("inf"), "a positive number"
    if key in _FLAGS:
        return isinstance(value, bool), "true or false"
    if key in _TEXTS:
        # MobileBERT's classifier_activation says whether its pooler has one.
        return isinstance(value, str) or (key == "classifier_activation" and isinstance(value, bool)), "a name"
    if key in _TABLES:
        return isinstance(value, Mapping), "an object"
    if key in ("classifier_from_token", "layer_types"):
        return isinstance(value, (list, tuple)) and all(isinstance(kind, str) for kind in value), "a list of names"
    return True, ""


class Keys:
    """config.json with a record of what was read; a value of a wrong kind is an error that names it."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw = raw
        self.name = name
        self.used: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        self.used.add(key)
        value = self.raw.get(key, default)
        if value is not None:
            right, expected = _is_right(key, value)
            if not right:
                raise CheckpointFormatError(f"{self.name}: config.json has {key}={value!r}; it must be {expected}")
        return value

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise CheckpointFormatError(f"{self.name}: config.json has no {key!r}")
        return value

    def only(self, key: str, allowed: Any) -> None:
        """Refuses any other value than `allowed`, which is also what an absent key means."""
        value = self.get(key, allowed)
        if value is not None and value != allowed:
            raise UnsupportedArchitectureError(
                f"{self.name}: config.json has {key}={value!r}; only {allowed!r} is supported for this architecture"
            )

    def report_unknown(self) -> None:
        unknown = sorted(set(self.raw) - self.used - _IRRELEVANT)
        if unknown:
            logger.warning("%s: config.json has keys that are not known here: %s", self.name, ", ".join(unknown))

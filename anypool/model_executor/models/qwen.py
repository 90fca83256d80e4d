"""Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388)."""

from __future__ import annotations

from anypool.model_executor.models.decoder import DecoderForCausalLM, DecoderStyle


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on q, k and v, none on the output."""

    style = DecoderStyle(output_bias=False)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys normalised per head."""

    style = DecoderStyle(qk_norm=True)

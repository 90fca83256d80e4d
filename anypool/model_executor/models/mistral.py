"""Mistral (arXiv:2310.06825)."""

from __future__ import annotations

from anypool.model_executor.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """Llama with a sliding window, where the checkpoint has one."""

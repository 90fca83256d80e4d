"""Llama (arXiv:2307.09288, arXiv:2407.21783)."""

from __future__ import annotations

from anypool.model_executor.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder."""

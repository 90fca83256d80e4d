"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from anypool.model_executor.models.decoder import DecoderForCausalLM, DecoderStyle


class GemmaForCausalLM(DecoderForCausalLM):
    """Scaled embeddings, norm weights stored minus one."""

    style = DecoderStyle(unit_offset_norm=True, scale_embedding=True)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Sandwich norms and soft-caps; sliding and full layers take turns."""

    style = DecoderStyle(unit_offset_norm=True, scale_embedding=True, sandwich_norm=True)


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 2 with normalised queries and keys; sliding and full layers have rotary bases of their own."""

    style = DecoderStyle(unit_offset_norm=True, scale_embedding=True, sandwich_norm=True, qk_norm=True)

"""Every architecture that has no native class: transformers' own module.

Best it runs on the packed batch: one row, explicit positions and no mask, where its attention layers call a function
of ours through transformers' attention interface, which attends within the sequences. Whether an architecture gives
its own numbers that way is not guessed: a probe at load compares texts together with each alone, and where they differ
takes padded batches, batches of equal lengths, or one text at a time. A second one compares a text in two chunks with
the whole text.
"""

from __future__ import annotations

from anypool.model_executor.models.transformers_backend.model import (
    TransformersForCausalLM,
    TransformersForConditionalGeneration,
    TransformersModel,
    is_causal_family,
    kind_of,
)
from anypool.model_executor.models.transformers_backend.ways import Way

__all__ = [
    "TransformersForCausalLM",
    "TransformersForConditionalGeneration",
    "TransformersModel",
    "Way",
    "is_causal_family",
    "kind_of",
]

"""Which architectures are tried, by task, and what their tiny configurations need beside the common sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.breadth.overrides import NOT_TEXT, OVERRIDES


class Case(NamedTuple):
    """An architecture that a checkpoint may have.

    Attributes:
        task: The mapping it is from: causal_lm, encoder, classify or token_classify.
        model_type: Its family.
        architecture: The class.
    """

    task: str
    model_type: str
    architecture: str

    @property
    def overrides(self) -> dict[str, Any]:
        return {**OVERRIDES.get(self.model_type, {}), **OVERRIDES.get(self.architecture, {})}


def cases() -> list[Case]:
    """Every text architecture of transformers' mappings, once per task."""
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    base = {
        **{t: name for t, name in auto.MODEL_MAPPING_NAMES.items() if t in masked or _is_text_to_text(t)},
        **auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    }
    seq2seq = {t: name for t, name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items() if _is_text_to_text(t)}
    tasks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("causal_lm", causal),
        ("encoder", base),
        ("encoder", masked),
        ("encoder", seq2seq),
        ("classify", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("token_classify", auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    )
    found: dict[tuple[str, str], Case] = {}
    for task, names in tasks:
        for model_type, given in names.items():
            for name in (given,) if isinstance(given, str) else given:
                if model_type not in NOT_TEXT and name not in NOT_TEXT:
                    found.setdefault((task, name), Case(task, model_type, name))
    return list(found.values())


def _is_text_to_text(model_type: str) -> bool:
    """Whether a family is an encoder-decoder of text: a tokenizer belongs to it, and no processor of anything else."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    others = {*PROCESSOR_MAPPING_NAMES, *FEATURE_EXTRACTOR_MAPPING_NAMES}
    return model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and model_type not in others

"""RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116)."""

from __future__ import annotations

from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.bert import BertModel


class RobertaModel(BertModel):
    """BERT whose positions start after the padding id."""

    @staticmethod
    def position_padding(config: ModelConfig) -> int | None:
        return 1 if config.pad_token_id is None else config.pad_token_id


class XLMRobertaModel(RobertaModel):
    """RoBERTa, trained on a hundred languages."""

"""MPNet (arXiv:2004.09297)."""

from __future__ import annotations

import math

import torch

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.split import LocalHeads
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.bert import BertModel

# Fixed in the reference, whatever the configuration says of the table's size.
_BUCKETS = 32
_MAX_DISTANCE = 128


class MPNetModel(BertModel):
    """BERT without segments, with one relative position bias for all layers."""

    has_attention_bias = True
    can_capture = False  # the bias is as large as the longest sequence
    checkpoint_renames = (
        (r"^mpnet\.", ""),
        (r"^encoder\.relative_attention_bias\.", "relative_attention_bias."),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attn\.(q|k|v|o)\.", r".attention.\1_proj."),
        (r"\.attention\.LayerNorm\.", ".attention.norm."),
        (r"\.intermediate\.dense\.", ".up_proj."),
        (r"\.output\.dense\.", ".down_proj."),
        (r"\.output\.LayerNorm\.", ".norm."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    )
    ignored_checkpoint_names = (r"(^|\.)pooler\.", r"embeddings\.position_ids$", r"^lm_head\.")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.relative_attention_bias = Embedding(config.relative_buckets, config.num_heads)
        self.local_heads = LocalHeads.share(config.num_heads, config.num_heads).queries

    @staticmethod
    def position_padding(config: ModelConfig) -> int | None:
        return 1  # in the reference, whatever the configuration says

    def attention_bias(self, attn: AttentionMetadata) -> torch.Tensor | None:
        weight = self.relative_attention_bias.weight
        position_M = torch.arange(attn.max_length, device=weight.device)
        bias_MMH: torch.Tensor = self.relative_attention_bias(_bucket(position_M[None, :] - position_M[:, None]))
        return bias_MMH[:, :, self.local_heads.start : self.local_heads.stop].permute(2, 0, 1)


def _bucket(ahead_MM: torch.Tensor) -> torch.Tensor:
    """T5's buckets (arXiv:1910.10683, section 2.1): exact near by, logarithmic far away, one half per side."""
    half = _BUCKETS // 2
    exact = half // 2
    distance_MM = ahead_MM.abs()
    far_MM = exact + (
        torch.log(distance_MM.float().clamp_min(1) / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact)
    ).to(torch.int64)
    side_MM = (ahead_MM > 0).to(torch.int64) * half
    return side_MM + torch.where(distance_MM < exact, distance_MM, far_MM.clamp_max(half - 1))

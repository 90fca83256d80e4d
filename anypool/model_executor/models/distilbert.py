"""DistilBERT (arXiv:1910.01108)."""

from __future__ import annotations

from anypool.model_executor.models.bert import BertModel


class DistilBertModel(BertModel):
    """BERT without segments."""

    checkpoint_renames = (
        (r"^distilbert\.", ""),
        (r"^transformer\.layer\.", "layers."),
        (r"\.attention\.(q|k|v)_lin\.", r".attention.\1_proj."),
        (r"\.attention\.out_lin\.", ".attention.o_proj."),
        (r"\.sa_layer_norm\.", ".attention.norm."),
        (r"\.ffn\.lin1\.", ".up_proj."),
        (r"\.ffn\.lin2\.", ".down_proj."),
        (r"\.output_layer_norm\.", ".norm."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    )
    ignored_checkpoint_names = (r"^vocab_(transform|layer_norm|projector)\.", r"embeddings\.position_ids$")

"""jina-embeddings-v3's XLM-RoBERTa with rotary positions (arXiv:2409.10173)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.norm import LayerNorm
from anypool.model_executor.layers.rotary import Rotary, apply_rotary
from anypool.model_executor.model_config import FULL, ModelConfig
from anypool.model_executor.models.bert import BertAttention, BertLayer
from anypool.model_executor.models.interfaces import Backbone, LayerStates
from anypool.model_executor.stages import Stages
from anypool.model_executor.weights.jina import FlashCheckpoint

CosSin = tuple[torch.Tensor, torch.Tensor]


class JinaEmbeddings(nn.Module):
    """Word and segment embeddings, summed and normalised. A text is one segment where nobody says otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, split=True)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, words_TD: torch.Tensor, token_type_ids_T: torch.Tensor | None) -> torch.Tensor:
        if token_type_ids_T is None:  # looked up all the same: adapters change the row
            token_type_ids_T = torch.zeros(len(words_TD), dtype=torch.long, device=words_TD.device)
        out_TD: torch.Tensor = self.norm(words_TD + self.token_type_embeddings(token_type_ids_T))
        return out_TD


class JinaAttention(BertAttention):
    """BERT's, with rotary positions."""

    def forward(self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata) -> torch.Tensor:  # type: ignore[override]
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv_proj(x_TD).chunk(3, dim=-1))
        attended_TD = self.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, attn).flatten(1)
        out_TD: torch.Tensor = self.norm(self.o_proj(attended_TD, add=x_TD))
        return out_TD


class JinaLayer(BertLayer):
    """BERT's, with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.attention = JinaAttention(config)

    def forward(self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata) -> torch.Tensor:  # type: ignore[override]
        x_TD = self.attention(x_TD, rotary, attn)
        out_TD: torch.Tensor = self.norm(self.down_proj(self.up_proj(x_TD, act=self.act), add=x_TD))
        return out_TD


class JinaEmbeddingsV3Model(Backbone):
    """The encoder. Its tasks' adapters are read by `adapters/task_adapters.py`."""

    attn_type = "encoder_only"
    default_pooling_type = "MEAN"
    takes_fewer_keys = True
    gives_layers = True
    mixes_adapters = True
    stages = Stages("layers", first=("embeddings",))
    can_split = True
    lora_tables = ("token_type_embeddings",)
    checkpoint_view = FlashCheckpoint
    checkpoint_renames = (
        (r"^roberta\.", ""),
        (r"^encoder\.", ""),
        (r"^(emb_ln|embeddings\.LayerNorm)\.", "embeddings.norm."),
        (r"\.(self_attn|mixer)\.", ".attention."),
        (r"\.attention\.out_proj\.", ".attention.o_proj."),
        (r"\.mlp\.fc1\.", ".up_proj."),
        (r"\.mlp\.fc2\.", ".down_proj."),
        (r"\.(norm1|post_attention_layernorm)\.", ".attention.norm."),
        (r"\.(norm2|post_mlp_layernorm)\.", ".norm."),
    )
    ignored_checkpoint_names = (r"(^|\.)pooler\.", r"^lm_head\.")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = JinaEmbeddings(config)
        self.layers = nn.ModuleList(JinaLayer(config) for _ in range(config.num_layers))
        self.rotary = Rotary(config.rope[FULL])
        self.can_capture = not config.rope[FULL].depends_on_length

    def forward(
        self,
        input_ids_T: torch.Tensor | None,
        positions_T: torch.Tensor,
        attn: AttentionMetadata,
        *,
        inputs_embeds_TD: torch.Tensor | None = None,
        token_type_ids_T: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
        output_layers: Sequence[int] = (),
    ) -> torch.Tensor:
        x_TD = intermediate
        if x_TD is None:
            words_TD = inputs_embeds_TD
            if words_TD is None:
                words_TD = self.embeddings.word_embeddings(input_ids_T)
            x_TD = self.embeddings(words_TD, token_type_ids_T)
        rotary = self.rotary(positions_T, attn, x_TD.dtype)
        states = LayerStates(output_layers)
        for layer in self.layers:
            states.see(x_TD)
            x_TD = layer(x_TD, rotary, attn)
        return states.result(x_TD)

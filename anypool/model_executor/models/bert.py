"""BERT (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from anypool.model_executor.attention import Attention, AttentionMetadata
from anypool.model_executor.layers.activation import activation
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.norm import LayerNorm
from anypool.model_executor.layers.positions import positions_after_padding
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, LayerStates, refuse_unused
from anypool.model_executor.weights.loading import Renames


class BertEmbeddings(nn.Module):
    """Word, position and, where the family has them, segment embeddings, summed and normalised."""

    def __init__(self, config: ModelConfig, *, position_offset: int = 0) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = Embedding(config.max_positions + position_offset, config.hidden_size)
        self.token_type_embeddings = (
            Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self, words_TD: torch.Tensor, positions_T: torch.Tensor, token_type_ids_T: torch.Tensor | None
    ) -> torch.Tensor:
        x_TD = words_TD + self.position_embeddings(positions_T)
        if self.token_type_embeddings is None:
            refuse_unused(token_type_ids_T=token_type_ids_T)
        elif token_type_ids_T is None:
            x_TD = x_TD + self.token_type_embeddings.weight[0]
        else:
            x_TD = x_TD + self.token_type_embeddings(token_type_ids_T)
        out_TD: torch.Tensor = self.norm(x_TD)
        return out_TD


class BertAttention(nn.Module):
    """Multi-head attention, residual, norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_heads
        self.qkv_proj = Linear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True)
        self.o_proj = Linear(size, size, bias=True)
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.attend = Attention(scale=config.attention_scale)

    def forward(
        self, x_TD: torch.Tensor, attn: AttentionMetadata, bias_HMM: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv_proj(x_TD).chunk(3, dim=-1))
        attended_TD = self.attend(q, k, v, attn, bias_HMM=bias_HMM).flatten(1)
        out_TD: torch.Tensor = self.norm(self.o_proj(attended_TD, add=x_TD))
        return out_TD


class BertLayer(nn.Module):
    """Attention and feed-forward, each normalised after its residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=True)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.act = activation(config.hidden_act)

    def forward(
        self, x_TD: torch.Tensor, attn: AttentionMetadata, bias_HMM: torch.Tensor | None = None
    ) -> torch.Tensor:
        x_TD = self.attention(x_TD, attn, bias_HMM)
        out_TD: torch.Tensor = self.norm(self.down_proj(self.up_proj(x_TD, act=self.act), add=x_TD))
        return out_TD


class BertModel(Backbone):
    """The encoder. The checkpoint's own pooler (a tanh layer over the first token) belongs to classification heads."""

    attn_type = "encoder_only"
    default_pooling_type = "MEAN"
    can_capture = True
    takes_fewer_keys = True
    gives_layers = True
    mixes_adapters = True
    checkpoint_renames: ClassVar[Renames] = (
        (r"^(bert|roberta)\.", ""),
        (r"\.LayerNorm\.gamma$", ".LayerNorm.weight"),
        (r"\.LayerNorm\.beta$", ".LayerNorm.bias"),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.self\.(query|key|value)\.", lambda m: f".attention.{m[1][0]}_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".attention.norm."),
        (r"\.intermediate\.dense\.", ".up_proj."),
        (r"\.output\.dense\.", ".down_proj."),
        (r"\.output\.LayerNorm\.", ".norm."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    )
    ignored_checkpoint_names: ClassVar[Sequence[str]] = (
        r"(^|\.)pooler\.",
        r"embeddings\.position_ids$",
        r"^cls\.",
        r"^lm_head\.",
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        padding = self.position_padding(config)
        self.embeddings = BertEmbeddings(config, position_offset=0 if padding is None else padding + 1)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    @staticmethod
    def position_padding(config: ModelConfig) -> int | None:
        """The padding id after which positions count, as RoBERTa's do; None where they count from 0."""
        return None

    def attention_bias(self, attn: AttentionMetadata) -> torch.Tensor | None:
        """`[H, M, M]` added to every layer's scores, M the longest sequence; BERT has none."""
        return None

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
        refuse_unused(intermediate=intermediate)
        if inputs_embeds_TD is None:
            inputs_embeds_TD = self.embeddings.word_embeddings(input_ids_T)
        padding = self.position_padding(self.config)
        if padding is not None:
            positions_T = positions_after_padding(input_ids_T, positions_T, attn, padding_id=padding)
        x_TD: torch.Tensor = self.embeddings(inputs_embeds_TD, positions_T, token_type_ids_T)
        bias_HMM = self.attention_bias(attn)
        states = LayerStates(output_layers)
        for layer in self.layers:
            states.see(x_TD)
            x_TD = layer(x_TD, attn, bias_HMM)
        return states.result(x_TD)

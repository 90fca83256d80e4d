"""ModernBERT (arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from anypool.model_executor.attention import Attention, AttentionMetadata
from anypool.model_executor.attention.layer import window_of
from anypool.model_executor.layers.activation import activation
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import GatedLinear, Linear
from anypool.model_executor.layers.norm import LayerNorm
from anypool.model_executor.layers.rotary import Rotary, apply_rotary
from anypool.model_executor.model_config import SLIDING, ModelConfig
from anypool.model_executor.models.interfaces import Backbone, LayerStates, refuse_unused

CosSin = tuple[torch.Tensor, torch.Tensor]


def _norm(config: ModelConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class ModernBertAttention(nn.Module):
    """Rotary attention; most layers see a window around each token."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.attend = Attention(
            scale=config.attention_scale,
            window=window_of(causal=False, sliding=config.sliding_window if kind == SLIDING else None),
        )

    def forward(
        self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata, *, add: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.Wqkv(x_TD).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended_THK = self.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, attn)
        out_TD: torch.Tensor = self.Wo(attended_THK.flatten(1), add=add)
        return out_TD


class ModernBertMLP(nn.Module):
    """act(x) * gate, both from one stored product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        act = activation(config.hidden_act)
        self.Wi = GatedLinear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, act=act)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TD: torch.Tensor, *, add: torch.Tensor) -> torch.Tensor:
        out_TD: torch.Tensor = self.Wo(self.Wi(x_TD), add=add)
        return out_TD


class ModernBertLayer(nn.Module):
    """Attention and feed-forward, normalised before; the first layer's input is normalised already."""

    def __init__(self, config: ModelConfig, kind: str, *, first: bool) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if first else _norm(config)
        self.attn = ModernBertAttention(config, kind)
        self.mlp_norm = _norm(config)
        self.mlp = ModernBertMLP(config)

    def forward(self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata) -> torch.Tensor:
        x_TD = self.attn(self.attn_norm(x_TD), rotary, attn, add=x_TD)
        out_TD: torch.Tensor = self.mlp(self.mlp_norm(x_TD), add=x_TD)
        return out_TD


class ModernBertEmbeddings(nn.Module):
    """Word embeddings, normalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)


class ModernBertModel(Backbone):
    """The encoder."""

    attn_type = "encoder_only"
    default_pooling_type = "MEAN"
    takes_fewer_keys = True
    gives_layers = True
    mixes_adapters = True
    checkpoint_renames = ((r"^model\.", ""),)
    ignored_checkpoint_names = (r"^head\.", r"^decoder\.")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = ModernBertEmbeddings(config)
        self.can_capture = not any(rope.depends_on_length for rope in config.rope.values())
        self.layers = nn.ModuleList(
            ModernBertLayer(config, kind, first=i == 0) for i, kind in enumerate(config.layer_types)
        )
        self.final_norm = _norm(config)
        self.rotary = {kind: Rotary(rope) for kind, rope in config.rope.items()}

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
        refuse_unused(token_type_ids_T=token_type_ids_T, intermediate=intermediate)
        if inputs_embeds_TD is None:
            inputs_embeds_TD = self.embeddings.tok_embeddings(input_ids_T)
        x_TD: torch.Tensor = self.embeddings.norm(inputs_embeds_TD)
        rotary = {kind: turn(positions_T, attn, x_TD.dtype) for kind, turn in self.rotary.items()}
        states = LayerStates(output_layers)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            states.see(x_TD)
            x_TD = layer(x_TD, rotary[kind], attn)
        return states.result(self.final_norm(x_TD))

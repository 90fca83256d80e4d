"""The decoder that Llama, Mistral, Qwen and Gemma share. A family's file says in what it differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.dispatch import uses_triton
from anypool.model_executor.attention import Attention, AttentionMetadata
from anypool.model_executor.attention.layer import window_of
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.mlp import GatedMLP
from anypool.model_executor.layers.norm import RMSNorm
from anypool.model_executor.layers.rotary import Rotary, apply_rotary
from anypool.model_executor.model_config import SLIDING, ModelConfig
from anypool.model_executor.models.interfaces import Backbone, LayerStates, refuse_unused

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DecoderStyle:
    """In what decoder families differ beyond sizes.

    Attributes:
        qk_norm: Queries and keys are normalised per head.
        output_bias: The output projection has a bias where q, k and v have one.
        sandwich_norm: Attention and feed-forward outputs are normalised before they are added, too.
        unit_offset_norm: Norm weights are stored minus one.
        scale_embedding: Embeddings are multiplied by sqrt(hidden size).
    """

    qk_norm: bool = False
    output_bias: bool = True
    sandwich_norm: bool = False
    unit_offset_norm: bool = False
    scale_embedding: bool = False

    def norm(self, size: int, config: ModelConfig) -> RMSNorm:
        return RMSNorm(size, eps=config.norm_eps, unit_offset=self.unit_offset_norm)


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, style: DecoderStyle, kind: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        q_size, kv_size = self.heads * self.head_size, self.kv_heads * self.head_size
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias and style.output_bias)
        if style.qk_norm:
            self.q_norm = style.norm(self.head_size, config)
            self.k_norm = style.norm(self.head_size, config)
        self.qk_norm = style.qk_norm
        self.attend = Attention(
            scale=config.attention_scale,
            window=window_of(causal=config.is_causal, sliding=config.sliding_window if kind == SLIDING else None),
            softcap=config.attention_softcap,
        )

    def forward(
        self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata, *, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        all_heads = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_size))
        q_THK, k_TGK, v_TGK = all_heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.qk_norm:
            q_THK, k_TGK = apply_rotary(self.q_norm(q_THK), *rotary), apply_rotary(self.k_norm(k_TGK), *rotary)
        else:
            turned = apply_rotary(all_heads[:, : self.heads + self.kv_heads], *rotary)
            q_THK, k_TGK = turned.split([self.heads, self.kv_heads], dim=1)
        out_TD: torch.Tensor = self.o_proj(self.attend(q_THK, k_TGK, v_TGK, attn).flatten(1), add=add)
        return out_TD


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before, and after as well in a sandwich."""

    def __init__(self, config: ModelConfig, style: DecoderStyle, kind: str) -> None:
        super().__init__()
        self.sandwich = style.sandwich_norm
        self.self_attn = DecoderAttention(config, style, kind)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias)
        self.input_layernorm = style.norm(config.hidden_size, config)
        self.post_attention_layernorm = style.norm(config.hidden_size, config)
        if self.sandwich:
            self.pre_feedforward_layernorm = style.norm(config.hidden_size, config)
            self.post_feedforward_layernorm = style.norm(config.hidden_size, config)

    def forward(self, x_TD: torch.Tensor, rotary: CosSin, attn: AttentionMetadata) -> torch.Tensor:
        out_TD: torch.Tensor
        normed_TD = self.input_layernorm(x_TD)
        if self.sandwich:
            x_TD = x_TD + self.post_attention_layernorm(self.self_attn(normed_TD, rotary, attn))
            out_TD = x_TD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TD)))
        elif uses_triton(x_TD):  # the sum goes with the norm behind it
            attended_TD = self.self_attn(normed_TD, rotary, attn)
            normed_TD, x_TD = self.post_attention_layernorm.after_sum(attended_TD, x_TD)
            out_TD = self.mlp(normed_TD, add=x_TD)
        else:
            x_TD = self.self_attn(normed_TD, rotary, attn, add=x_TD)
            out_TD = self.mlp(self.post_attention_layernorm(x_TD), add=x_TD)
        return out_TD


class DecoderModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, style: DecoderStyle) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_scale = config.hidden_size**0.5 if style.scale_embedding else None
        self.layer_types = config.layer_types
        self.layers = nn.ModuleList(DecoderLayer(config, style, kind) for kind in config.layer_types)
        self.norm = style.norm(config.hidden_size, config)
        self.rotary = {kind: Rotary(rope) for kind, rope in config.rope.items()}

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD: torch.Tensor = self.embed_tokens(input_ids_T)
        # The factor is rounded to the model's dtype first, as the reference does.
        return x_TD if self.embed_scale is None else x_TD * torch.tensor(self.embed_scale, dtype=x_TD.dtype)

    def forward(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attn: AttentionMetadata,
        *,
        output_layers: Sequence[int] = (),
    ) -> torch.Tensor:
        rotary = {kind: turn(positions_T, attn, x_TD.dtype) for kind, turn in self.rotary.items()}
        states = LayerStates(output_layers)
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            states.see(x_TD)
            x_TD = layer(x_TD, rotary[kind], attn)
        return states.result(self.norm(x_TD))


class DecoderForCausalLM(Backbone):
    """A causal LM over `DecoderModel`. Subclasses set `style`."""

    attn_type = "decoder"
    default_pooling_type = "LAST"
    takes_fewer_keys = True
    gives_layers = True
    mixes_adapters = True
    style: ClassVar[DecoderStyle] = DecoderStyle()
    ignored_checkpoint_names = (r"rotary_emb\.inv_freq$",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.takes_prefix = config.is_causal
        self.can_capture = not any(rope.depends_on_length for rope in config.rope.values())
        self.model = DecoderModel(config, self.style)
        self.lm_head = self.build_lm_head()

    def build_lm_head(self) -> nn.Module | None:
        """The output projection; None where it is the input embedding. A pooling subclass builds none."""
        return None if self.config.tie_word_embeddings else Linear(self.config.hidden_size, self.config.vocab_size)

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
            assert input_ids_T is not None
            inputs_embeds_TD = self.model.embed(input_ids_T)
        hidden_TD: torch.Tensor = self.model(inputs_embeds_TD, positions_T, attn, output_layers=output_layers)
        return hidden_TD

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """`[T, V]` logits of the next token."""
        logits_TV: torch.Tensor = (
            F.linear(hidden_TD, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden_TD)
        )
        cap = self.config.final_softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

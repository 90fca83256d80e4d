"""DeBERTa-v2 and v3 (arXiv:2006.03654, arXiv:2111.09543): attention with separate scores for content and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.activation import activation
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.norm import LayerNorm
from anypool.model_executor.layers.split import LocalHeads
from anypool.model_executor.model_config import DisentangledConfig, ModelConfig
from anypool.model_executor.models.interfaces import Backbone, LayerStates
from anypool.model_executor.stages import Stages

# Scores that exist at one time, in elements; there are three such matrices.
_SCORES = 2 * 1024 * 1024


class DebertaAttention(nn.Module):
    """Content to content, content to position and position to content, residual, norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = len(LocalHeads.share(config.num_heads, config.num_heads).queries)
        style = _style(config)
        self.kinds = style.kinds
        self.shared = style.share_key
        self.qkv_proj = Linear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True, split="column")
        if style.span and not self.shared and "c2p" in self.kinds:
            self.pos_key_proj = Linear(size, size, bias=True, split="column")
        if style.span and not self.shared and "p2c" in self.kinds:
            self.pos_query_proj = Linear(size, size, bias=True, split="column")
        self.o_proj = Linear(size, size, bias=True, split="row")
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.scale = 1 / math.sqrt(size // config.num_heads * (1 + len(self.kinds)))

    def forward(
        self, x_TD: torch.Tensor, attn: AttentionMetadata, positions_RD: torch.Tensor | None, index_MM: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv_proj(x_TD).chunk(3, dim=-1))
        pos_q, pos_k = self._positions(positions_RD)
        out_THK = torch.empty_like(q)
        for row, _, count, length, *_ in attn.runs:
            step = max(1, _SCORES // (self.heads * length * length))
            for first in range(0, count, step):
                n = min(step, count - first)
                rows = slice(row + first * length, row + (first + n) * length)
                q_NHLK, k_NHLK, v_NHLK = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
                scores = q_NHLK @ k_NHLK.transpose(-1, -2)
                index_LL = index_MM[:length, :length].expand(n, self.heads, length, length)
                if pos_k is not None:  # what a token says about how far a key is
                    scores = scores + (q_NHLK @ pos_k.transpose(-1, -2)).gather(-1, index_LL)
                if pos_q is not None:  # what a key says about how far the query is
                    at_key = (k_NHLK @ pos_q.transpose(-1, -2)).gather(-1, index_LL.transpose(-1, -2))
                    scores = scores + at_key.transpose(-1, -2)
                probs = (scores * self.scale).float().softmax(dim=-1).to(v_NHLK.dtype)
                out_THK[rows].unflatten(0, (n, length)).copy_((probs @ v_NHLK).transpose(1, 2))
        out_TD: torch.Tensor = self.norm(self.o_proj(out_THK.flatten(1), add=x_TD))
        return out_TD

    def _positions(self, positions_RD: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`[H, R, K]` queries and keys of the relative positions, where this model has them."""
        if positions_RD is None:
            return None, None
        if self.shared:
            q, k, _ = self.qkv_proj(positions_RD).chunk(3, dim=-1)
        else:
            q = self.pos_query_proj(positions_RD) if "p2c" in self.kinds else None
            k = self.pos_key_proj(positions_RD) if "c2p" in self.kinds else None
        split = [
            None if x is None or kind not in self.kinds else x.unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for x, kind in ((q, "p2c"), (k, "c2p"))
        ]
        return split[0], split[1]


class DebertaLayer(nn.Module):
    """Attention and feed-forward, each normalised after its residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = DebertaAttention(config)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=True, split="column")
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=True, split="row")
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.act = activation(config.hidden_act)

    def forward(
        self, x_TD: torch.Tensor, attn: AttentionMetadata, positions_RD: torch.Tensor | None, index_MM: torch.Tensor
    ) -> torch.Tensor:
        x_TD = self.attention(x_TD, attn, positions_RD, index_MM)
        out_TD: torch.Tensor = self.norm(self.down_proj(self.up_proj(x_TD, act=self.act), add=x_TD))
        return out_TD


class DebertaConv(nn.Module):
    """A convolution over each sequence beside the first layer, as the large v2 models have it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, style = config.hidden_size, _style(config)
        self.width, self.groups = style.conv_width, style.conv_groups
        self.weight = nn.Parameter(torch.empty(size, size // self.groups, self.width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.act = activation(style.conv_act)

    def forward(self, input_TD: torch.Tensor, layer_TD: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        padding = (self.width - 1) // 2
        parts = [
            F.conv1d(part.t().unsqueeze(0), self.weight, self.bias, padding=padding, groups=self.groups)[0].t()
            for part in input_TD.split(attn.lengths)
        ]
        out_TD: torch.Tensor = self.norm(layer_TD + self.act(torch.cat(parts)))
        return out_TD


class DebertaEmbeddings(nn.Module):
    """Word embeddings, with positions and segments where the checkpoint has them, normalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, size, split=True)
        self.position_embeddings = Embedding(config.max_positions, size) if _style(config).absolute else None
        self.token_type_embeddings = Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.norm = LayerNorm(size, eps=config.norm_eps)

    def forward(
        self, words_TD: torch.Tensor, positions_T: torch.Tensor, token_type_ids_T: torch.Tensor | None
    ) -> torch.Tensor:
        if self.position_embeddings is not None:
            words_TD = words_TD + self.position_embeddings(positions_T)
        if self.token_type_embeddings is not None:
            types_T = torch.zeros_like(positions_T) if token_type_ids_T is None else token_type_ids_T
            words_TD = words_TD + self.token_type_embeddings(types_T)
        out_TD: torch.Tensor = self.norm(words_TD)
        return out_TD


class DebertaV2Model(Backbone):
    """The encoder. Segments of text pairs count only where the checkpoint has a table of them."""

    attn_type = "encoder_only"
    gives_layers = True
    stages = Stages("layers", first=("embeddings", "conv"))
    can_split = True
    default_pooling_type = "MEAN"
    checkpoint_renames = (
        (r"^deberta\.", ""),
        (r"^encoder\.layer\.", "layers."),
        (r"^encoder\.rel_embeddings\.", "rel_embeddings."),
        (r"^encoder\.LayerNorm\.", "rel_norm."),
        (r"^encoder\.conv\.conv\.", "conv."),
        (r"^encoder\.conv\.LayerNorm\.", "conv.norm."),
        (r"\.attention\.self\.(query|key|value)_proj\.", lambda m: f".attention.{m[1][0]}_proj."),
        (r"\.attention\.self\.", ".attention."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".attention.norm."),
        (r"\.intermediate\.dense\.", ".up_proj."),
        (r"\.output\.dense\.", ".down_proj."),
        (r"\.output\.LayerNorm\.", ".norm."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    )
    ignored_checkpoint_names = (
        r"(^|\.)pooler\.",
        r"position_ids$",
        r"^cls\.",
        r"^(lm_predictions|mask_predictions)\.",
        r"embeddings\.position_embeddings\.",  # stored by models that do not use them
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = DebertaEmbeddings(config)
        self.layers = nn.ModuleList(DebertaLayer(config) for _ in range(config.num_layers))
        style = _style(config)
        self.rel_embeddings = Embedding(2 * style.span, config.hidden_size) if style.span else None
        self.rel_norm = LayerNorm(config.hidden_size, eps=config.norm_eps) if style.normalize else None
        self.conv = DebertaConv(config) if style.conv_width else None

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
            words_TD = self.embeddings.word_embeddings(input_ids_T) if inputs_embeds_TD is None else inputs_embeds_TD
            x_TD = self.embeddings(words_TD, positions_T, token_type_ids_T)
        relative_RD = self.rel_embeddings.weight if self.rel_embeddings is not None else None
        if relative_RD is not None and self.rel_norm is not None:
            relative_RD = self.rel_norm(relative_RD)
        index_MM = self._relative_index(attn.max_length, x_TD.device)
        embedded_TD = x_TD
        states = LayerStates(output_layers)
        for i, layer in enumerate(self.layers):
            states.see(x_TD)
            x_TD = layer(x_TD, attn, relative_RD, index_MM)
            if i == 0 and self.conv is not None and intermediate is None:
                x_TD = self.conv(embedded_TD, x_TD, attn)
        return states.result(x_TD)

    def _relative_index(self, longest: int, device: torch.device) -> torch.Tensor:
        """`[M, M]` row of the relative position table for each query and key."""
        position_M = torch.arange(longest, device=device)
        behind_MM = position_M[:, None] - position_M[None, :]
        style = _style(self.config)
        if style.logarithmic:
            behind_MM = _log_bucket(behind_MM, style.span, style.furthest)
        return (behind_MM + style.span).clamp(0, max(0, 2 * style.span - 1))


def _style(config: ModelConfig) -> DisentangledConfig:
    assert config.disentangled is not None
    return config.disentangled


def _log_bucket(behind_MM: torch.Tensor, buckets: int, furthest: int) -> torch.Tensor:
    """Exact up to half the buckets, logarithmic beyond (arXiv:2111.09543's code)."""
    middle = buckets // 2
    distance_MM = torch.where(behind_MM.abs() < middle, middle - 1, behind_MM.abs())
    # In float32 and in this order: `ceil` turns a last bit of difference into another bucket.
    scale = torch.log(torch.tensor((furthest - 1) / middle))
    far_MM = torch.ceil(torch.log(distance_MM / middle) / scale * (middle - 1)) + middle
    return torch.where(distance_MM <= middle, behind_MM, (far_MM * behind_MM.sign()).to(behind_MM.dtype))

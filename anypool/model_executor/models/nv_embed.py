"""NV-Embed (Lee et al., arXiv:2405.17428): a Mistral without its mask, and attention to an array of latent vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from anypool.config import is_int
from anypool.errors import CheckpointFormatError
from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.norm import LayerNorm
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import refuse_unused
from anypool.model_executor.models.mistral import MistralForCausalLM

# Where config.json is silent.
_SIZES = {
    "num_latents_value": 512,
    "num_cross_heads": 8,
    "hidden_dim": 4096,
    "latent_dim": 4096,
    "cross_dim_head": 4096,
}
_EPS = 1e-5  # torch's, in both norms of a block


class LatentCrossAttention(nn.Module):
    """x + W_o softmax(q k^T / sqrt(K)) v: q of the token, k and v of the latent vectors, each side normalised."""

    def __init__(self, size: int, latent_size: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = LayerNorm(size, eps=_EPS)
        self.norm_context = LayerNorm(latent_size, eps=_EPS)
        self.to_q = Linear(size, heads * head_size)
        self.to_kv = Linear(latent_size, 2 * heads * head_size)
        self.to_out = Linear(heads * head_size, size)

    def forward(self, x_TD: torch.Tensor, latents_RD: torch.Tensor) -> torch.Tensor:
        q_HTK = self.to_q(self.norm(x_TD)).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        keys_RD, values_RD = self.to_kv(self.norm_context(latents_RD)).chunk(2, dim=-1)
        k_HRK, v_HRK = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in (keys_RD, values_RD))
        mixed_HTK = F.scaled_dot_product_attention(q_HTK, k_HRK, v_HRK)
        out_TD: torch.Tensor = self.to_out(mixed_HTK.transpose(0, 1).flatten(1), add=x_TD)
        return out_TD


class LatentFeedForward(nn.Module):
    """x + W_2 (a * gelu(b)), where a and b are the halves of W_1 norm(x)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = LayerNorm(size, eps=_EPS)
        self.up = Linear(size, 8 * size, bias=True)
        self.down = Linear(4 * size, size, bias=True)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        factor_TF, gate_TF = self.up(self.norm(x_TD)).chunk(2, dim=-1)
        out_TD: torch.Tensor = self.down(factor_TF * F.gelu(gate_TF), add=x_TD)
        return out_TD


class NVEmbedModel(MistralForCausalLM):
    """The decoder, and what its states get out of the latent array: each token by itself, so that any pooling fits."""

    gives_layers = False
    mixes_adapters = False  # keys and values of the latents are no rows of the batch
    checkpoint_renames = (
        (r"^embedding_model\.", "model."),
        (r"^latent_attention_model\.latents$", "latents"),
        (r"^latent_attention_model\.cross_attend_blocks\.0\.(fn\.)?", "cross."),
        (r"^latent_attention_model\.cross_attend_blocks\.1\.fn\.net\.0\.", "feed.up."),
        (r"^latent_attention_model\.cross_attend_blocks\.1\.fn\.net\.2\.", "feed.down."),
        (r"^latent_attention_model\.cross_attend_blocks\.1\.", "feed."),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        given = _SIZES | {
            key: value for key, value in (config.raw.get("latent_attention_config") or {}).items() if key in _SIZES
        }
        if not all(is_int(size) and size > 0 for size in given.values()):
            raise CheckpointFormatError(f"{config.name}: latent_attention_config has sizes that are none: {given}")
        size, latent_size = given["latent_dim"], given["hidden_dim"]
        self.latents = nn.Parameter(torch.empty(given["num_latents_value"], latent_size), requires_grad=False)
        self.cross = LatentCrossAttention(size, latent_size, given["num_cross_heads"], given["cross_dim_head"])
        self.feed = LatentFeedForward(size)

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
        refuse_unused(output_layers=tuple(output_layers))
        hidden_TD = super().forward(
            input_ids_T,
            positions_T,
            attn,
            inputs_embeds_TD=inputs_embeds_TD,
            token_type_ids_T=token_type_ids_T,
            intermediate=intermediate,
        )
        out_TD: torch.Tensor = self.feed(self.cross(hidden_TD, self.latents))
        return out_TD

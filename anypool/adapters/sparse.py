"""Sparse vectors of a checkpoint: SPLADE over a masked language model's head, or a sparse autoencoder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anypool.adapters.masked_lm_head import MaskedLMHead, placed, read_masked_lm_head, word_embeddings
from anypool.adapters.recipe import Recipe
from anypool.adapters.router import RouterRecipe
from anypool.adapters.sparse_recipe import AutoEncoderRecipe, SpladeRecipe
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint, open_checkpoint
from anypool.model_executor.weights.loading import load_weights
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.heads import Normalize
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import SparseDefaults
from anypool.pooling.sparse import AutoEncoderPooler, LatentEncoder, SparsePooler, SpladePooler

# The decoder of an autoencoder is its encoder, transposed: one of the names is stored, as a rule this one.
_DECODER = "decoder.linear.weight"
_ENCODER = "encoder.weight"


@dataclass(frozen=True, kw_only=True)
class Backing:
    """What a sparse pooler stands on.

    Attributes:
        model: The loaded backbone.
        types: Pooling types of its dense embedding.
        dense: What follows them, up to rows of `size`.
        device, dtype: Where and in what the backbone runs.
    """

    model: nn.Module
    types: tuple[PoolingType, ...]
    dense: nn.Module
    size: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SparseHead:
    """What makes sparse vectors, read from the checkpoint and not yet on the backbone.

    Attributes:
        name: What it is, for `anypool info`.
        sparse: What a request gets where it asks for nothing.
        build: Makes its pooler.
        is_alone: Whether the checkpoint says nothing about a dense embedding beside it.
        tensors: The backbone's tensors that it holds.
    """

    name: str
    sparse: SparseDefaults
    build: Callable[[Backing], SparsePooler]
    is_alone: bool = False
    tensors: frozenset[str] = frozenset()


def find_sparse_head(
    repository: Repository, recipe: Recipe, config: ModelConfig, checkpoint: Checkpoint, *, convert: str
) -> SparseHead | None:
    """The sparse head that a checkpoint has, or that `convert` asks for; None where there is none.

    Args:
        repository: The checkpoint.
        recipe: Its recipe.
        config: The backbone's configuration.
        checkpoint: The backbone's tensors.
        convert: The engine's `convert`. "sparse" makes SPLADE of a masked language model, as sentence-transformers
            does with a folder without modules.json; "embed" leaves a head out.

    Raises:
        ConfigError: There is nothing to make sparse vectors with.
        ModelLoadError: The head's files are wrong or of an unknown kind.
    """
    asked = recipe.sparse
    if convert == "embed":
        return None
    if convert == "sparse" and asked is None:
        if recipe.types is not None or not config.architecture.endswith("ForMaskedLM"):
            raise ConfigError(
                f"convert='sparse': {config.name} is a {config.architecture} and has no head of a masked language "
                "model: load a checkpoint saved as ...ForMaskedLM, or a sentence-transformers SparseEncoder"
            )
        asked = SpladeRecipe()
    if isinstance(asked, SpladeRecipe):
        return _splade(asked, recipe, read_masked_lm_head(config, checkpoint))
    if isinstance(asked, AutoEncoderRecipe):
        return _auto_encoder(asked, recipe, repository)
    return None


def _splade(asked: SpladeRecipe, recipe: Recipe, head: MaskedLMHead) -> SparseHead:
    def build(backing: Backing) -> SparsePooler:
        where = backing.device, backing.dtype
        own = head.decoder_VD
        return SpladePooler(
            head.transform.to(*where),
            word_embeddings(backing.model) if own is None else placed(own, *where),
            None if head.bias_V is None else placed(head.bias_V, *where),
            strategy=asked.strategy,
            twice=asked.twice,
        )

    activation = "log1p_relu" if asked.twice else "relu"
    return SparseHead(
        name=f"SPLADE, {asked.strategy} of {activation} over {head.size:,} words",
        sparse=SparseDefaults(
            size=head.size,
            max_active_dims=recipe.max_active_dims,
            joins_windows=asked.strategy == "max",
            **_ways(recipe),
        ),
        build=build,
        is_alone=True,
        tensors=head.tensors,
    )


def _ways(recipe: Recipe) -> dict[str, frozenset[bool | None]]:
    router = recipe.router or RouterRecipe()
    return {"looked_up": router.looked_up, "unrouted": router.unrouted}


def _auto_encoder(asked: AutoEncoderRecipe, recipe: Recipe, repository: Repository) -> SparseHead:
    encoder = LatentEncoder(asked.input_dim, asked.hidden_dim, standardize=asked.normalize)
    checkpoint = open_checkpoint(repository, asked.path)
    has_both = _ENCODER in checkpoint.names()
    load_weights(
        encoder,
        checkpoint,
        name=f"{repository.name}/{asked.path}",
        renames=() if has_both else ((f"^{re.escape(_DECODER)}$", _ENCODER),),
        ignored=("^stats_last_nonzero$", f"^{re.escape(_DECODER)}$"),  # the first only counts in training
        prefixes=("",),
    )
    encoder.requires_grad_(False)

    def build(backing: Backing) -> SparsePooler:
        if backing.size != asked.input_dim:
            raise CheckpointFormatError(
                f"{repository.name}: {asked.path} takes rows of {asked.input_dim}, but what comes before gives "
                f"{backing.size}"
            )
        # A Normalize before the autoencoder ends the chain of the dense embedding.
        dense = nn.Sequential(backing.dense, Normalize()) if recipe.normalize else backing.dense
        return AutoEncoderPooler(backing.types, dense, encoder.to(backing.device))

    most = min(asked.k, asked.hidden_dim)
    return SparseHead(
        name=f"sparse autoencoder {asked.input_dim} -> {asked.hidden_dim}, {most} active",
        sparse=SparseDefaults(
            size=asked.hidden_dim,
            max_active_dims=recipe.max_active_dims or most,
            joins_windows=False,
            **_ways(recipe),
        ),
        build=build,
    )

"""A table of token vectors, without a transformer: what model2vec distils and StaticEmbedding trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anypool.errors import CheckpointFormatError, WeightsError
from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, refuse_unused
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.loading import materialize
from anypool.model_executor.weights.repository import Repository

# By sentence-transformers, and by model2vec.
_TABLES = ("embedding.weight", "embeddings")


class StaticModel(Backbone):
    """The hidden state of a token is its row of a table, whatever stands around it."""

    attn_type = "encoder_only"
    default_pooling_type = "MEAN"
    fills_batches = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)

    def load(
        self, folder: Repository, *, device: torch.device, dtype: torch.dtype, claimed: frozenset[str], progress: bool
    ) -> None:
        """Fills the table. A vocabulary-quantised model2vec folder has fewer rows than tokens, and says which is whose.

        Raises:
            WeightsError: A tensor is left over or does not fit.
        """
        materialize(self, device=device, dtype=dtype)
        checkpoint = open_checkpoint(folder)
        found = dict(checkpoint.tensors(set(checkpoint.names()) - claimed))
        rows_RD = next(found.pop(name) for name in _TABLES if name in found).float()
        mapping_V, weights_V = found.pop("mapping", None), found.pop("weights", None)
        if found:
            raise WeightsError(
                f"{folder.name}: tensors with no place in a table of vectors: {', '.join(sorted(found))}"
            )
        if mapping_V is not None:
            if mapping_V.is_floating_point() or not 0 <= int(mapping_V.min()) <= int(mapping_V.max()) < len(rows_RD):
                raise WeightsError(f"{folder.name}: mapping names rows outside the {len(rows_RD):,} of the table")
            rows_RD = rows_RD[mapping_V.long()]
        if weights_V is not None:
            if weights_V.shape != rows_RD.shape[:1]:
                raise WeightsError(
                    f"{folder.name}: weights has shape {list(weights_V.shape)}, there are {len(rows_RD):,} tokens"
                )
            rows_RD = rows_RD * weights_V.float()[:, None]
        self.embed_tokens.weight.copy_(rows_RD)

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
        refuse_unused(intermediate=intermediate, output_layers=tuple(output_layers))
        if inputs_embeds_TD is not None:
            return inputs_embeds_TD
        rows_TD: torch.Tensor = self.embed_tokens(input_ids_T)
        return rows_TD


def table_size(folder: Repository) -> tuple[int, int]:
    """How many tokens a table has vectors for, and their size.

    Raises:
        CheckpointFormatError: The folder holds no such table.
    """
    checkpoint = open_checkpoint(folder)
    names = checkpoint.names()
    name = next((name for name in _TABLES if name in names), None)
    shape = () if name is None else checkpoint.shape(name)
    if len(shape) != 2:
        raise CheckpointFormatError(
            f"{folder.name}: the weights hold {', '.join(sorted(names)[:5])}; a table of token vectors has a matrix "
            f"{' or '.join(map(repr, _TABLES))}"
        )
    return checkpoint.shape("mapping")[0] if "mapping" in names else shape[0], shape[1]

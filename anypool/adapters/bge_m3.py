"""BGE-M3 (Chen et al., arXiv:2402.03216): one encoder, whose states are a dense, a sparse and many vectors at once.

FlagEmbedding keeps the two further heads beside the encoder, in `sparse_linear.pt` and `colbert_linear.pt`, each the
state of one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from anypool.errors import CheckpointFormatError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.plan import SparseDefaults
from anypool.pooling.pooler import Pooler
from anypool.pooling.sparse import LexicalPooler, ProjectedTokenPooler
from anypool.pooling.tasks import PoolingTask

SPARSE_FILE, MULTI_VECTOR_FILE = "sparse_linear.pt", "colbert_linear.pt"

# Tokens that get no weight, as the tokenizer names them, and what XLM-RoBERTa's are.
_UNUSED = {"cls_token": ("<s>", 0), "pad_token": ("<pad>", 1), "eos_token": ("</s>", 2), "unk_token": ("<unk>", 3)}


@dataclass(frozen=True, kw_only=True)
class BgeM3:
    """The heads that were found, in float32.

    Attributes:
        poolers: By the task that each serves.
        sparse: What a request for sparse vectors gets where it asks for nothing; None where there is no such head.
    """

    poolers: Mapping[PoolingTask, Pooler]
    sparse: SparseDefaults | None


def find_bge_m3(repository: Repository, config: ModelConfig, token_id: Callable[[str], int] | None) -> BgeM3 | None:
    """The heads that lie beside an encoder; None where there are none.

    Args:
        repository: The checkpoint.
        config: The encoder's configuration.
        token_id: The tokenizer's id of a token, for those that get no weight.

    Raises:
        CheckpointFormatError: A file is no linear layer over the encoder's states.
    """
    poolers: dict[PoolingTask, Pooler] = {}
    if repository.exists(SPARSE_FILE):
        linear = _read(repository, SPARSE_FILE, config.hidden_size)
        if linear.out_features != 1:
            raise CheckpointFormatError(
                f"{repository.name}: {SPARSE_FILE} gives {linear.out_features} numbers per token, not a weight"
            )
        unused = _unused(repository, token_id)
        poolers[PoolingTask.SPARSE_EMBED] = LexicalPooler(linear, unused, config.vocab_size)
    if repository.exists(MULTI_VECTOR_FILE):
        poolers[PoolingTask.TOKEN_EMBED] = ProjectedTokenPooler(
            _read(repository, MULTI_VECTOR_FILE, config.hidden_size)
        )
    if not poolers:
        return None
    has_sparse = PoolingTask.SPARSE_EMBED in poolers
    return BgeM3(poolers=poolers, sparse=SparseDefaults(size=config.vocab_size) if has_sparse else None)


def _read(repository: Repository, file: str, hidden_size: int) -> nn.Linear:
    """A linear layer from its pickled state, of which only tensors are unpickled."""
    where = f"{repository.name}: {file}"
    try:
        state = torch.load(repository.folder / file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises half a dozen unrelated types for a damaged file
        raise CheckpointFormatError(f"{where} cannot be read as plain tensors: {error}") from error
    if not isinstance(state, dict) or set(state) != {"weight", "bias"}:
        found = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointFormatError(f"{where} has {found}; expected weight and bias")
    weight, bias = state["weight"], state["bias"]
    if weight.dim() != 2 or weight.shape[1] != hidden_size or bias.shape != weight.shape[:1]:
        raise CheckpointFormatError(
            f"{where} has weight {list(weight.shape)} and bias {list(bias.shape)}; the encoder's states have "
            f"{hidden_size} numbers"
        )
    linear = nn.Linear(hidden_size, len(weight))
    linear.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return linear.requires_grad_(False)


def _unused(repository: Repository, token_id: Callable[[str], int] | None) -> list[int]:
    """Ids of the tokens that get no weight: FlagEmbedding leaves out those of the tokenizer's four special roles."""
    if token_id is None:
        return [number for _, number in _UNUSED.values()]
    saved = repository.read_object("special_tokens_map.json") or repository.read_object("tokenizer_config.json") or {}
    ids = []
    for role, (usual, _) in _UNUSED.items():
        token = saved.get(role, usual)
        ids.append(token_id(token["content"] if isinstance(token, dict) else token))
    return ids

"""How two embeddings are compared, under the names that sentence-transformers gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from anypool.errors import CheckpointFormatError

# Rows `[N, E]` with rows `[N, E]` -> `[N]`, larger is more alike; distances are negated.
SIMILARITIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda a_NE, b_NE: (F.normalize(a_NE, dim=-1) * F.normalize(b_NE, dim=-1)).sum(dim=-1),
    "dot": lambda a_NE, b_NE: (a_NE * b_NE).sum(dim=-1),
    "euclidean": lambda a_NE, b_NE: -(a_NE - b_NE).norm(dim=-1),
    "manhattan": lambda a_NE, b_NE: -(a_NE - b_NE).abs().sum(dim=-1),
}


def similarity(name: str | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The similarity of that name; cosine where a checkpoint names none."""
    if name is None:
        return SIMILARITIES["cosine"]
    if name not in SIMILARITIES:
        raise CheckpointFormatError(
            f"config_sentence_transformers.json has similarity_fn_name {name!r}; known: {', '.join(SIMILARITIES)}"
        )
    return SIMILARITIES[name]

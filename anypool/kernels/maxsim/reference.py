"""`maxsim` in plain torch."""

from __future__ import annotations

import torch


def maxsim(query_QE: torch.Tensor, document_DE: torch.Tensor) -> torch.Tensor:
    """sum over query tokens of the largest dot product with a document token (Khattab & Zaharia, arXiv:2004.12832).

    Args:
        query_QE: `[Q, E]` query token vectors.
        document_DE: `[D, E]` document token vectors, at least one.

    Returns:
        A float32 scalar.
    """
    return (query_QE.float() @ document_DE.float().T).amax(dim=1).sum()

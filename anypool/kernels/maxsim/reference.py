"""`maxsim` in plain torch."""

from __future__ import annotations

import torch


def maxsim(query_QE: torch.Tensor, document_DE: torch.Tensor) -> torch.Tensor:
    """A float32 scalar; arguments as for the public function."""
    return (query_QE.float() @ document_DE.float().T).amax(dim=1).sum()


def maxsim_pairs(
    queries_QE: torch.Tensor,
    cu_queries: torch.Tensor,
    documents_DE: torch.Tensor,
    cu_documents: torch.Tensor,
    pairs_P2: torch.Tensor,
) -> torch.Tensor:
    """`[P]` float32; arguments as for the public function."""
    queries = queries_QE.split(cu_queries.diff().tolist())
    documents = documents_DE.split(cu_documents.diff().tolist())
    scores = [maxsim(queries[i], documents[j]) for i, j in pairs_P2.tolist()]
    return torch.stack(scores) if scores else queries_QE.new_empty(0, dtype=torch.float32)

"""Late interaction: how well a text's token vectors cover a query's."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.maxsim import reference

__all__ = ["maxsim", "maxsim_pairs"]


def maxsim(query_QE: torch.Tensor, document_DE: torch.Tensor) -> torch.Tensor:
    """sum over query tokens of the largest dot product with a document token (Khattab & Zaharia, arXiv:2004.12832).

    Args:
        query_QE: `[Q, E]` query token vectors.
        document_DE: `[D, E]` document token vectors, at least one.

    Returns:
        A float32 scalar.
    """
    assert len(document_DE) > 0
    if not uses_triton(query_QE):
        return reference.maxsim(query_QE, document_DE)
    device = query_QE.device
    bounds = [torch.tensor([0, len(rows)], dtype=torch.int32, device=device) for rows in (query_QE, document_DE)]
    pair_12 = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return maxsim_pairs(query_QE, bounds[0], document_DE, bounds[1], pair_12)[0]


def maxsim_pairs(
    queries_QE: torch.Tensor,
    cu_queries: torch.Tensor,
    documents_DE: torch.Tensor,
    cu_documents: torch.Tensor,
    pairs_P2: torch.Tensor,
) -> torch.Tensor:
    """`maxsim` of many pairs of packed texts.

    Args:
        queries_QE: `[Q, E]` token vectors of all queries.
        cu_queries: `[queries + 1]` int32: query i is rows `cu_queries[i]:cu_queries[i+1]`.
        documents_DE: `[D, E]` token vectors of all documents.
        cu_documents: `[documents + 1]` int32; no document that is asked for may be empty.
        pairs_P2: `[P, 2]` int64: a query and a document each.

    Returns:
        `[P]` float32.
    """
    assert queries_QE.shape[1] == documents_DE.shape[1] and pairs_P2.shape[1] == 2
    if not uses_triton(queries_QE):
        return reference.maxsim_pairs(queries_QE, cu_queries, documents_DE, cu_documents, pairs_P2)
    from anypool.kernels.maxsim import triton

    return triton.maxsim_pairs(queries_QE, cu_queries, documents_DE, cu_documents, pairs_P2)

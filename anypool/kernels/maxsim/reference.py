"""`maxsim` in plain torch."""

from __future__ import annotations

import torch

# Products that exist at one time, in elements: 16 MiB of float32.
_PRODUCTS = 4 * 1024 * 1024


def maxsim(query_QE: torch.Tensor, document_DE: torch.Tensor) -> torch.Tensor:
    """A float32 scalar; arguments as for the public function.

    Blocks of the query follow from the two texts alone, so that a score is the same among any others.
    """
    query_QE, document_ED = query_QE.float(), document_DE.float().T
    blocks = query_QE.split(max(1, _PRODUCTS // len(document_DE)))
    return torch.cat([(block_QE @ document_ED).amax(dim=1) for block_QE in blocks]).sum()


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

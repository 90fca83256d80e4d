"""Hierarchical token pooling: fewer vectors per document, each the mean of a cluster (Clavié et al., arXiv:2409.14683).

Tokens are joined by Ward's criterion into about `1 / factor` as many clusters. Libraries disagree on the details, so
the same document has other vectors in each; `TOKEN_POOLINGS` names the published variants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from anypool.errors import InvalidParameterError, MissingDependencyError


@dataclass(frozen=True, kw_only=True)
class TokenPooling:
    """A way to pool a document's token vectors.

    Attributes:
        factor: About how many tokens become one vector; 1 joins none.
        protected: Leading tokens that keep their vectors.
        protected_last: Whether these stand behind the clusters rather than before them.
        by_rows: Whether a token's distances to all tokens are taken for its coordinates, rather than for distances.
            It is what `scipy.cluster.hierarchy.linkage` makes of a square matrix.
        normalize: "none", "clusters" or "all": which vectors are scaled to unit length afterwards, "all" also where
            none are joined.
    """

    factor: float = 1.0
    protected: int = 1
    protected_last: bool = False
    by_rows: bool = False
    normalize: str = "none"


TOKEN_POOLINGS: dict[str, TokenPooling] = {
    "sentence-transformers": TokenPooling(normalize="all"),
    "pylate": TokenPooling(),  # since 1.4
    "pylate-1.3": TokenPooling(protected_last=True, by_rows=True),
    "colpali": TokenPooling(protected=0, by_rows=True, normalize="clusters"),
}


def token_pooling(name: str, factor: float) -> TokenPooling:
    """The variant of that name with this factor.

    Raises:
        InvalidParameterError: The name is unknown.
        MissingDependencyError: scipy, which finds the clusters, is not installed.
    """
    if name not in TOKEN_POOLINGS:
        raise InvalidParameterError(
            f"token_pooling={name!r} is unknown; known: {', '.join(TOKEN_POOLINGS)}", param="token_pooling"
        )
    if factor > 1:
        require_scipy()
    return replace(TOKEN_POOLINGS[name], factor=factor)


def require_scipy() -> None:
    """Raises a `MissingDependencyError` where scipy is not installed."""
    if find_spec("scipy") is None:
        raise MissingDependencyError("token pooling needs scipy: pip install 'anypool[token-pooling]'")


def pool_tokens(rows_LE: torch.Tensor, how: TokenPooling) -> torch.Tensor:
    """One document's vectors after pooling.

    Args:
        rows_LE: `[L, E]` float32, of unit length.
        how: The variant and its factor.

    Returns:
        `[M, E]` float32 where the rows are, M at most `protected + max((L - protected) // factor, 1)`.
    """
    protected, rest = rows_LE[: how.protected], rows_LE[how.protected :]
    clusters = max(int(len(rest) // how.factor), 1)
    if how.factor <= 1 or clusters >= len(rest):
        return _unit(rows_LE) if how.normalize == "all" else rows_LE
    means = _means(rest, _labels(rest, clusters, by_rows=how.by_rows))
    if how.normalize == "clusters":
        means = _unit(means)
    pooled = torch.cat([means, protected] if how.protected_last else [protected, means])
    return _unit(pooled) if how.normalize == "all" else pooled


def _labels(rows_LE: torch.Tensor, clusters: int, *, by_rows: bool) -> torch.Tensor:
    """`[L]` the cluster of each row, counted from 0; there may be fewer than asked for where distances are equal."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    rows_LE = rows_LE.float().cpu()
    distances_LL = (1 - rows_LE @ rows_LE.T).numpy()
    if not by_rows:
        distances_LL = squareform(distances_LL.clip(0, 2), checks=False)
    found = fcluster(linkage(distances_LL, method="ward"), t=clusters, criterion="maxclust")
    labels_L: torch.Tensor = torch.from_numpy(found).long().unique(return_inverse=True)[1]
    return labels_L


def _means(rows_LE: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
    labels_L = labels_L.to(rows_LE.device)
    counts_M = labels_L.bincount()
    sums_ME = rows_LE.new_zeros(len(counts_M), rows_LE.shape[1]).index_add_(0, labels_L, rows_LE)
    return sums_ME / counts_M[:, None]


def _unit(rows_LE: torch.Tensor) -> torch.Tensor:
    return F.normalize(rows_LE, p=2, dim=-1, eps=1e-12)

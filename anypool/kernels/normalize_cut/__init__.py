"""Cut to the leading dimensions, then scale to unit length."""

from __future__ import annotations

from anypool.kernels.normalize_cut.reference import normalize_cut

__all__ = ["normalize_cut"]

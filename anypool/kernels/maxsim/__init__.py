"""Late interaction: how well a text's token vectors cover a query's."""

from __future__ import annotations

from anypool.kernels.maxsim.reference import maxsim

__all__ = ["maxsim"]

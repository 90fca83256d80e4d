"""Beyond one machine, on Ray: `embed_dataset` and `Embed` for Ray Data; `serve.app` for Ray Serve."""

from anypool.entrypoints.ray.data import DatasetReport, Embed, embed_dataset

__all__ = ["DatasetReport", "Embed", "embed_dataset"]

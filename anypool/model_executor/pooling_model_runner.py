"""Runs a pooling model on packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anypool.model_executor.packed_batch import PackedBatch
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import PooledGroup


class PoolingModelRunner:
    """Forward, pool, one copy to the host.

    Args:
        model: A pooling model: a backbone with a `pooler`.
        device: Where it runs.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device

    def run(self, batch: PackedBatch, plans: Sequence[PoolingPlan]) -> list[torch.Tensor]:
        """Results in the order of the batch's sequences.

        Args:
            batch: The packed sequences, on the model's device.
            plans: One per sequence.

        Returns:
            Per sequence `[E]`, or `[tokens, E]` for token-level tasks: float32 on the CPU, views of one buffer.
        """
        groups = self._forward(batch, plans)
        # Allocated outside inference mode, so that results can be used where gradients are recorded.
        host = torch.empty(sum(group.values.numel() for group in groups), dtype=torch.float32)
        results: list[torch.Tensor | None] = [None] * len(plans)
        start = 0
        for group in groups:
            values = host[start : start + group.values.numel()].view(group.values.shape)
            values.copy_(group.values)
            start += values.numel()
            parts = values.unbind(0) if group.rows is None else values.split(group.rows)
            for request, part in zip(group.requests, parts, strict=True):
                results[request] = part
        assert all(result is not None for result in results), "a pooler left a request without a result"
        return results  # type: ignore[return-value]

    @torch.inference_mode()
    def _forward(self, batch: PackedBatch, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        tokens = batch.input_ids_T.shape[0]
        if self.device.type == "cpu":
            batch = batch.filled()
        hidden_TD = self.model(
            batch.input_ids_T, batch.positions_T, batch.attn, token_type_ids_T=batch.token_type_ids_T
        )
        groups: list[PooledGroup] = self.model.pooler(hidden_TD[:tokens], batch.segments, plans)
        return groups

"""What a model answers, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anypool import LLM, PoolingParams
from anypool.errors import ConfigError
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True)
class Job:
    """A checkpoint and the calls that are made.

    Attributes:
        folder: The checkpoint.
        calls: Of each the task, prompts as token ids, and the fields of its `PoolingParams`.
        engine: Engine arguments.
    """

    folder: str
    calls: Sequence[tuple[str, list[list[int]], dict[str, Any]]]
    engine: dict[str, Any] = field(default_factory=dict)


Answers = dict[str, list[torch.Tensor] | str]


def answers(jobs: dict[str, Job]) -> Answers:
    """The rows of all prompts of all calls, by job; a refusal's words where a model is not loaded."""
    return {name: _answer(job) for name, job in jobs.items()}


def _answer(job: Job) -> list[torch.Tensor] | str:
    try:
        llm = LLM(job.folder, device="cpu", use_tqdm_on_load=False, **job.engine)
    except ConfigError as error:
        return str(error)
    rows = []
    with llm:
        for task, prompts, fields in job.calls:
            requests = llm.engine.prepare(prompts, PoolingTask(task), PoolingParams(**fields))
            llm.engine.submit(requests)
            rows += [request.future.result(60) for request in requests]
    return rows

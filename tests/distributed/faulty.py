"""A Llama in which tokens cause what goes wrong on real machines. The processes of the ranks import it by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from anypool.model_executor.distributed import ranks
from anypool.model_executor.models.llama import LlamaForCausalLM

BAD, NO_MEMORY, STUCK, SLOW = 113, 114, 115, 116
PASSES = "ANYPOOL_TEST_PASSES"
"""The environment's name of a file to which each stage writes when it began and ended a pass with `SLOW` in it."""


class FaultyForCausalLM(LlamaForCausalLM):
    """`BAD` raises on the last rank, `NO_MEMORY` there as well where it is not alone, `STUCK` never ends there."""

    def forward(self, input_ids_T: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:  # type: ignore[override]
        ids, here = input_ids_T.tolist(), ranks()
        is_last = here.rank == here.size - 1
        if BAD in ids and is_last:
            raise ValueError("boom")
        if ids.count(NO_MEMORY) > 1 and is_last:
            raise MemoryError("boom")
        if STUCK in ids and is_last:
            time.sleep(300)
        began = time.monotonic()
        if SLOW in ids:
            time.sleep(0.05)
        hidden_TD = super().forward(input_ids_T, *args, **named)
        if SLOW in ids:
            with Path(os.environ[PASSES]).open("a") as file:
                file.write(f"{here.pp_rank} {began} {time.monotonic()}\n")
        return hidden_TD

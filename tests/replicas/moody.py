"""A BERT that does as some tokens say: for tests of what happens around a model."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from anypool.model_executor.models.bert import BertModel

# Ids of tiny_bert's vocabulary.
KILLS, SLEEPS, RAISES, NAPS = 60, 61, 62, 63
SLEEP_S, NAP_S = 0.3, 4.0


class MoodyBert(BertModel):
    """Kills its process, sleeps or raises where a batch has the token for it."""

    def forward(self, input_ids_T: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        ids = set(input_ids_T.tolist())
        if SLEEPS in ids:
            time.sleep(SLEEP_S)
        if NAPS in ids:
            time.sleep(NAP_S)
        if KILLS in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISES in ids:
            raise RuntimeError("a bad mood")
        return super().forward(input_ids_T, *arguments, **named)

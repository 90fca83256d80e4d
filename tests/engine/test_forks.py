"""An engine belongs to the process that made it: a forked copy says so, waits for nothing and ends nothing."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Iterator

import pytest

from anypool import LLM
from anypool.errors import EngineDeadError
from tests.helpers import loaded, tiny_bert, vectors

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # what these tests are about
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(tiny_bert()) as llm:
        yield llm


def _forked(task: Callable[[], bytes]) -> bytes:
    """What a task answers in a forked process, which gets ten seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, task())
        finally:
            os._exit(0)
    os.close(write)
    until = time.monotonic() + 10
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the forked process hangs")
            time.sleep(0.01)
        return os.read(read, 10_000)
    finally:
        os.close(read)


def test_a_forked_engine_names_both_processes_and_the_way_out(llm: LLM) -> None:
    def task() -> bytes:
        try:
            vectors(llm, ["a cat"])
        except EngineDeadError as error:
            return str(error).encode()
        return b"ran"

    message = _forked(task).decode()
    assert f"forked from process {os.getpid()}" in message
    assert "multiprocessing.get_context('spawn')" in message


def test_a_forked_engine_waits_for_no_lock_that_the_parent_had(llm: LLM) -> None:
    def task() -> bytes:
        with pytest.raises(EngineDeadError):
            vectors(llm, ["a cat"])
        llm.close()
        return b"closed"

    with llm.engine._changed:
        assert _forked(task) == b"closed"
    assert len(vectors(llm, ["a cat"])) == 1


def test_a_forked_engine_ends_nothing_of_the_parents(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(llm.engine, "close", lambda **_: ended.append(True))

    def task() -> bytes:
        llm.close()
        llm.__del__()
        return b"ended" if ended else b"left"

    assert _forked(task) == b"left"


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_neither_pickled_nor_copied(llm: LLM, act: Callable[[LLM], object]) -> None:
    with pytest.raises(TypeError, match="make an LLM in each process"):
        act(llm)

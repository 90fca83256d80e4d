"""The device waits a moment for callers who have just been answered, and for nobody who does not come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from anypool import AsyncEngine, EngineConfig
from anypool.engine import async_engine, gathering
from anypool.engine import engine as engine_module
from anypool.engine.engine import Engine
from anypool.engine.gathering import Gathering
from tests.engine.test_async_engine import embed, run
from tests.engine.test_engine import ids
from tests.helpers import tiny_bert

PASS_S = 0.2


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test may set."""
    now = [100.0]
    monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def after_a_batch(of: int, seconds: float = 0.08) -> Gathering:
    waiting = Gathering(is_on=True)
    again(waiting, of, seconds)
    return waiting


def again(waiting: Gathering, answered: int, seconds: float = 0.08) -> None:
    waiting.batch_ended(seconds)
    for _ in range(answered):
        waiting.answered()


def test_the_wait_ends_when_as_many_have_come_as_were_answered(now: list[float]) -> None:
    waiting = after_a_batch(3)
    assert waiting.wait_s(is_full=False) == pytest.approx(0.02)
    waiting.came()
    waiting.came()
    assert waiting.wait_s(is_full=False) > 0
    waiting.came()
    assert waiting.wait_s(is_full=False) == 0


def test_the_wait_is_bounded_by_the_last_batch(now: list[float]) -> None:
    waiting = after_a_batch(3)
    now[0] += 0.015
    assert waiting.wait_s(is_full=False) == pytest.approx(0.005)
    now[0] += 0.006
    assert waiting.wait_s(is_full=False) == 0


def test_nobody_is_waited_for_where_it_cannot_pay(now: list[float]) -> None:
    assert after_a_batch(0).wait_s(is_full=False) == 0
    assert after_a_batch(3).wait_s(is_full=True) == 0, "enough waits to fill a batch"
    ended = after_a_batch(3)
    ended.end()
    assert ended.wait_s(is_full=False) == 0
    off = Gathering(is_on=False)
    again(off, 3)
    assert off.wait_s(is_full=False) == 0


def test_callers_that_do_not_come_back_are_not_waited_for_often(now: list[float]) -> None:
    waiting = Gathering(is_on=True)
    waits = []
    for _ in range(2 * (gathering._MISSES + gathering._PAUSE)):
        again(waiting, 4)
        waits.append(waiting.wait_s(is_full=False) > 0)
        waiting.came()
        waiting.batch_began()
    assert sum(waits) == 2 * gathering._MISSES


def test_callers_that_come_back_are_always_waited_for(now: list[float]) -> None:
    waiting = Gathering(is_on=True)
    for _ in range(50):
        again(waiting, 4)
        assert waiting.wait_s(is_full=False) > 0
        for _ in range(3):
            waiting.came()
        waiting.batch_began()


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Computes on all cores, and a pass takes `PASS_S` seconds at least."""
    monkeypatch.setattr(engine_module, "computes_on_all_cores", lambda: True)
    engine = Engine(EngineConfig(model=str(tiny_bert()), device="cpu", use_tqdm_on_load=False))
    forward = engine.loaded.model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PASS_S)
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.loaded.model, "forward", slow)
    yield engine
    engine.close()


def test_callers_in_a_loop_share_each_batch(slow_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_QUIET_S", 0.03)
    serving = AsyncEngine(slow_engine)

    async def caller(number: int) -> None:
        for _ in range(3):
            await embed(serving, ids(3))
            await asyncio.sleep(0.001 * number)

    async def main() -> None:
        await asyncio.gather(*map(caller, range(8)))

    run(main)
    assert slow_engine.metrics.batches == 3


def test_a_caller_that_leaves_does_not_hold_up_the_others(slow_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_SHARE", 50.0)
    serving = AsyncEngine(slow_engine)

    async def main() -> float:
        first = asyncio.ensure_future(embed(serving, ids(3)))
        await asyncio.sleep(PASS_S / 2)
        second = asyncio.ensure_future(embed(serving, ids(3)))
        await first
        began = time.monotonic()
        await second
        return time.monotonic() - began

    assert run(main) < 10 * PASS_S

"""Overload, clients that leave, malformed bodies and a poisonous request, together and at a small scale.

Nothing here is timed: machines that run tests are slow at times. `benchmarks/http_stress.py` measures.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from benchmarks.http_stress import counters, settled, storm
from tests.entrypoints.test_operations import Program


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process is gone")


@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_storm_costs_no_accepted_request_and_leaves_nothing_behind(minilm: str) -> None:
    async def run(program: Program) -> None:
        await storm(program.address, clients=8, seconds=1, leaving=0.1, malformed=0.1)  # buffers get their size
        before = resident_mb(program.process.pid)
        outcomes = await storm(program.address, clients=200, seconds=5, leaving=0.15, malformed=0.15)
        assert await settled(program.address, timeout_s=60)
        good, malformed = outcomes["good"], outcomes["malformed"]
        assert set(good.statuses) == {200, 429}
        assert set(malformed.statuses) == {400}
        assert outcomes["left"].statuses[0] > 10
        assert (good.wrong, good.without_retry_after) == (0, 0)
        found = await counters(program.address)
        assert found['anypool_inputs_total{model="minilm",outcome="error"}'] == 0
        assert found['anypool_rejected_total{model="minilm"}'] > 0
        assert resident_mb(program.process.pid) < before + 150
        assert program.process.poll() is None

    with Program(minilm, "--max-queued-tokens", "400") as program:
        asyncio.run(run(program))


def test_a_poisonous_request_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine._executor.runner  # type: ignore[attr-defined]
    run = runner.launch
    poison = engine.prepare(["poison"], engine.supported_tasks[0])[0].token_ids[1]

    def fail(batch: Any, *more: Any) -> Any:
        if poison in batch.input_ids_T.tolist():
            raise RuntimeError("a kernel failed")
        return run(batch, *more)

    monkeypatch.setattr(runner, "launch", fail)

    async def call() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=create_app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            texts = [f"a text {number}" for number in range(10)] + ["some poison here"] + ["b"] * 5
            return await asyncio.gather(*(client.post("/v1/embeddings", json={"input": text}) for text in texts))

    responses = asyncio.run(call())
    assert [response.status_code for response in responses] == [200] * 10 + [500] + [200] * 5
    assert "kernel" not in json.dumps(responses[10].json())

"""`GET /health`, `/ping` and `/version`. They ask nothing of the device thread, so they answer while it is busy."""

from __future__ import annotations

from fastapi import APIRouter, Request

import anypool
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.http_errors import ERROR_RESPONSES
from anypool.errors import EngineDeadError

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=ERROR_RESPONSES)
async def health(http: Request) -> dict[str, str]:
    """Whether requests are served: 200, or 503 where the device thread is dead or stuck."""
    engine: Engine = http.app.state.engine
    health = engine.health()
    if health.status == "dead":
        raise EngineDeadError(f"the engine has stopped, restart the server: {health.message}")
    if health.status == "stuck":
        raise EngineDeadError(f"the engine is stuck: {health.message}")
    return {"status": "ok"}


@router.get("/ping", responses=ERROR_RESPONSES)
async def ping(http: Request) -> dict[str, str]:
    """The same as `/health`, under the name that SageMaker asks for."""
    return await health(http)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of anypool."""
    return {"version": anypool.__version__}

"""The application: routes over an engine."""

from __future__ import annotations

import time

from fastapi import FastAPI

import anypool
from anypool.engine.async_engine import AsyncEngine
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.http_errors import install_error_handlers
from anypool.entrypoints.serve.routes import embeddings, health, models

MAX_BODY_BYTES = 64 * 1024 * 1024


def create_app(engine: Engine, *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The HTTP application of an engine. Closing the engine stays with whoever made it.

    Args:
        engine: What serves the requests.
        max_body_bytes: Largest request body; a larger one is answered with 413.
    """
    app = FastAPI(title="anypool", version=anypool.__version__, summary="Embeddings from any language model")
    app.state.engine = engine
    app.state.async_engine = AsyncEngine(engine)
    app.state.max_body_bytes = max_body_bytes
    app.state.created = int(time.time())
    install_error_handlers(app)
    for routes in (embeddings, models, health):
        app.include_router(routes.router)
    return app

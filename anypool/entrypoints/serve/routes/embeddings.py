"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from anypool.engine.async_engine import AsyncEngine
from anypool.engine.request import Request as EngineRequest
from anypool.entrypoints.serve.body import parse_body, read_body
from anypool.entrypoints.serve.disconnect import unless_gone
from anypool.entrypoints.serve.encoding import encode_embeddings
from anypool.entrypoints.serve.http_errors import ERROR_RESPONSES
from anypool.entrypoints.serve.routes.models import check_model
from anypool.entrypoints.serve.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from anypool.pooling.tasks import PoolingTask

router = APIRouter()

# Fewer numbers than this are encoded faster than a thread is asked to.
_INLINE_NUMBERS = 16_384

_REQUEST_BODY = {
    "required": True,
    "content": {"application/json": {"schema": EmbeddingRequest.model_json_schema()}},
}


@router.post(
    "/v1/embeddings",
    responses={200: {"model": EmbeddingResponse}, **ERROR_RESPONSES},
    openapi_extra={"requestBody": _REQUEST_BODY},
)
async def create_embeddings(http: Request) -> Response:
    """Embeds texts or token ids."""
    body = await read_body(http, http.app.state.max_body_bytes)
    content = await unless_gone(http, _embed(http.app.state.async_engine, body))
    return Response(content, media_type="application/json")


async def _embed(engine: AsyncEngine, body: bytes) -> bytes:
    parsed: list[EmbeddingRequest] = []

    def prepare() -> list[EngineRequest]:
        asked = parse_body(body, EmbeddingRequest)
        parsed.append(asked)
        check_model(engine.engine, asked.model)
        return engine.engine.prepare(asked.input, PoolingTask.EMBED, asked.pooling_params, asked.prompt_options)

    requests, vectors_E = await engine.serve(prepare, size=len(body))
    model = engine.engine.config.served_model_name or engine.engine.config.model
    arguments = {"model": model, "encoding_format": parsed[0].encoding_format or "float"}
    if sum(vector_E.numel() for vector_E in vectors_E) <= _INLINE_NUMBERS:
        return encode_embeddings(requests, vectors_E, **arguments)
    return await asyncio.to_thread(encode_embeddings, requests, vectors_E, **arguments)

"""What is asked about the server itself: health, models, versions, metrics and documents. None of it runs a model, and
none of it waits for the device thread, so it answers while that is busy.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

import anypool
from anypool.entrypoints.serve.encoding import json_answer
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.http_errors import ErrorStyle, HTTPError
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.models import (
    HealthResponse,
    InfoResponse,
    ModelCard,
    ModelList,
    VersionResponse,
)
from anypool.entrypoints.serve.served import ServedModel
from anypool.errors import EngineDeadError

if TYPE_CHECKING:
    from anypool.entrypoints.serve.state import ServerState


def live(state: ServerState, exchange: Exchange) -> Response:
    """Whether the process is worth keeping: 503 where a device thread is dead or stuck."""
    for model in state.models:
        health = model.engine.health()
        if health.status == "dead":
            raise EngineDeadError(f"the engine has stopped, restart the server: {health.message}")
        if health.status == "stuck":
            raise EngineDeadError(f"the engine is stuck: {health.message}")
    return json_answer({"status": "ok"})


def ready(state: ServerState, exchange: Exchange) -> Response:
    """Whether requests should be sent here: as `live`, and 503 from SIGTERM on, and while no replica works."""
    if state.is_draining:
        raise HTTPError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "1"})
    answer = live(state, exchange)
    for model in state.models:
        if not (health := model.engine.health()).is_ready:
            raise EngineDeadError(f"the engine runs nothing now: {health.message}")
    return answer


def version(state: ServerState, exchange: Exchange) -> Response:
    """The version of anypool."""
    return json_answer({"version": anypool.__version__})


def list_models(state: ServerState, exchange: Exchange) -> Response:
    """The served models, and each with the adapters that requests may name."""
    return json_answer({"object": "list", "data": [model_card(model) for model in state.models.all()]})


def get_model(state: ServerState, exchange: Exchange) -> Response:
    """One of them."""
    name: str = exchange.request.path_params["model"]
    if not name:
        raise HTTPException(404)
    return json_answer(model_card(state.models.find(name)))


def model_card(model: ServedModel) -> dict[str, Any]:
    """A `ModelCard`."""
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.source,
        parent=None if model.parent is None else model.parent.name,
        max_model_len=model.engine.max_model_len,
    ).model_dump()


def info(state: ServerState, exchange: Exchange) -> Response:
    """What text-embeddings-inference says of a model, and everything that `anypool info` does."""
    model = state.models.find(exchange.request.query_params.get("model"))
    engine = model.engine
    config, loaded = engine.config, engine.loaded
    assert config.max_num_batched_tokens is not None
    return json_answer(
        InfoResponse(
            model_id=model.name,
            model_sha=config.revision,
            model_dtype=str(loaded.dtype).removeprefix("torch."),
            served_model_name=model.name,
            model_type=_model_type(model),
            max_concurrent_requests=state.options.max_concurrent_requests or config.max_queued_tokens,
            max_input_length=engine.max_model_len,
            max_batch_tokens=config.max_num_batched_tokens,
            max_batch_requests=config.max_num_seqs,
            max_client_batch_size=state.options.max_inputs,
            auto_truncate=True,
            tokenization_workers=model.async_engine.num_threads,
            version=anypool.__version__,
            card=model.card,
        ).model_dump()
    )


def _model_type(model: ServedModel) -> dict[str, Any]:
    if model.kind == "embedding":
        types = model.card["pooling"].get("pooling_type", {}).get("value", "")
        listed = [types] if isinstance(types, str) else types
        return {"embedding": {"pooling": "+".join(str(one).lower() for one in listed)}}
    labels = model.engine.loaded.config.head.id2label
    labelled = {
        "id2label": {str(i): label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
    }
    return {"reranker" if model.kind == "reranker" else "classifier": labelled}


def metrics(state: ServerState, exchange: Exchange) -> Response:
    """All counters, in Prometheus' text form."""
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def openapi(state: ServerState, exchange: Exchange) -> Response:
    """The OpenAPI document."""
    return json_answer(exchange.request.app.openapi())


def docs(state: ServerState, exchange: Exchange) -> Response:
    """The routes as a page that needs nothing from elsewhere."""
    shown = [route for route in state.routes if route.is_shown]
    rows = "".join(
        f"<tr><td>{', '.join(route.methods)}</td><td><code>{html.escape('  '.join(route.paths))}</code></td>"
        f"<td>{html.escape(route.summary)}</td></tr>"
        for route in shown
    )
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>anypool {anypool.__version__}</title>"
        "<style>body{font:1rem/1.5 system-ui;margin:2rem auto;max-width:60rem;padding:0 1rem}"
        "td{padding:.3rem 1rem .3rem 0;vertical-align:top;border-top:1px solid #8884}</style>"
        f"<h1>anypool {anypool.__version__}</h1><p>Fields and answers of every route are in "
        f"<a href='/openapi.json'>/openapi.json</a>.</p><table>{rows}</table></html>"
    )
    return HTMLResponse(page)


def _get(paths: str, summary: str, answer: Any, response: Any = None, **more: Any) -> Route:
    return Route(
        paths=tuple(paths.split()), summary=summary, methods=("GET",), answer=answer, response=response, **more
    )


ROUTES = (
    _get("/health", "Whether requests should be sent here", ready, HealthResponse, is_public=True),
    _get("/health/ready", "The same", ready, HealthResponse, is_public=True),
    _get("/health/live", "Whether the process is worth keeping", live, HealthResponse, is_public=True),
    Route(
        paths=("/ping",),
        summary="The same as /health, for SageMaker",
        methods=("GET", "POST"),
        answer=ready,
        response=HealthResponse,
        is_public=True,
    ),
    _get("/version", "The version of anypool", version, VersionResponse),
    _get("/v1/models /models", "The served models", list_models, ModelList),
    _get("/v1/models/{model}", "One of them", get_model, ModelCard),
    _get("/info", "Everything about a model", info, InfoResponse, style=ErrorStyle.TEI, query=("model",)),
    _get("/metrics", "All counters, for Prometheus", metrics),
    _get("/openapi.json /api-doc/openapi.json", "The OpenAPI document", openapi, is_shown=False),
    _get("/docs", "The routes as a page", docs, is_shown=False),
)

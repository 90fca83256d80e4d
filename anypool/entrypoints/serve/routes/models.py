"""`GET /v1/models`, and the check of a request's `model`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.http_errors import ERROR_RESPONSES, HTTPError

router = APIRouter()


class ModelCard(BaseModel):
    """A served model. `root` is what was loaded; `max_model_len` is how many tokens it takes at once."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "anypool"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(http: Request) -> ModelList:
    """Lists the served models."""
    return ModelList(data=[_card(http)])


@router.get("/v1/models/{model:path}", responses=ERROR_RESPONSES)
async def get_model(http: Request, model: str) -> ModelCard:
    """Describes a served model."""
    check_model(http.app.state.engine, model)
    return _card(http)


def check_model(engine: Engine, name: str | None) -> None:
    """Raises a 404 `HTTPError` for a model that is not served here; no name means the one that is."""
    served = engine.config.served_model_name or engine.config.model
    if name not in (None, "", served, engine.config.model):
        raise HTTPError(
            404, f"the model {name!r} is not served here; served: {served!r}", param="model", code="model_not_found"
        )


def _card(http: Request) -> ModelCard:
    engine: Engine = http.app.state.engine
    return ModelCard(
        id=engine.config.served_model_name or engine.config.model,
        created=http.app.state.created,
        root=engine.config.model,
        max_model_len=engine.max_model_len,
    )

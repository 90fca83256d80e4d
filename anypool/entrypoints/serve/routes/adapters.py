"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go while the server runs."""

from __future__ import annotations

from typing import Any

import torch
from starlette.responses import Response

from anypool.entrypoints.serve.call import Call, Work
from anypool.entrypoints.serve.encoding import Stamp, json_answer
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes.service import model_card
from anypool.entrypoints.serve.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest, UnloadedAdapter
from anypool.entrypoints.serve.schemas.models import ModelCard
from anypool.entrypoints.serve.served import ServedModel


def load(asked: LoadAdapterRequest, model: ServedModel) -> Work:
    """Reads an adapter, which requests may name from then on."""
    adapted = model.siblings.load(model, asked.lora_name, asked.lora_path, in_place=bool(asked.load_inplace))
    return _answered(model_card(adapted))


def unload(asked: UnloadAdapterRequest, model: ServedModel) -> Work:
    """Forgets an adapter."""
    model.siblings.unload(asked.lora_name)
    return _answered(UnloadedAdapter(id=asked.lora_name).model_dump())


def _answered(body: Any) -> Work:
    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer(body)

    return Work(requests=[], encode=encode)


ROUTES = (
    Route(
        paths=("/v1/load_lora_adapter",),
        summary="Reads a LoRA adapter, which requests may name from then on",
        calls=(Call(LoadAdapterRequest, load, ModelCard),),
    ),
    Route(
        paths=("/v1/unload_lora_adapter",),
        summary="Forgets a LoRA adapter",
        calls=(Call(UnloadAdapterRequest, unload, UnloadedAdapter),),
    ),
)

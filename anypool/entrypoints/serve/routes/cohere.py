"""`/v2/embed`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from starlette.responses import Response

from anypool.entrypoints.serve.call import Call, Work
from anypool.entrypoints.serve.encoding import Form, Stamp, as_matrix, base64_of, json_answer, json_of, usage_of
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.cohere import CohereEmbedRequest, CohereEmbedResponse
from anypool.entrypoints.serve.served import ServedModel
from anypool.pooling.tasks import PoolingTask


def embed(asked: CohereEmbedRequest, model: ServedModel) -> Work:
    """Vectors of texts, in every form that is asked for."""
    options = model.prompt_options(asked)
    requests = model.requests(asked.prompts, PoolingTask.EMBED, asked.pooling_params, options)
    kinds = list(dict.fromkeys(asked.embedding_types or ["float"]))

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        rows = as_matrix(results)
        usage = usage_of(requests)
        return json_answer(
            {
                "id": stamp.request_id,
                "response_type": "embeddings_by_type",
                "embeddings": {kind: _in_form(rows, kind) for kind in kinds},
                "texts": asked.prompts,
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": usage["prompt_tokens"]},
                },
            }
        )

    return Work(requests=requests, encode=encode)


def _in_form(rows: np.ndarray, kind: str) -> list[Any]:
    if kind == "base64":
        packed = Form(encoding="base64").packed(rows)
        return [base64_of(row) for row in packed]
    numbers = Form(dtype="float32" if kind == "float" else kind).numbers(rows) if len(rows) else rows
    return [json_of(np.ascontiguousarray(row)) for row in numbers]


ROUTES = (
    Route(
        paths=("/v2/embed",),
        summary="Embeds texts, as Cohere's API does",
        calls=(Call(CohereEmbedRequest, embed, CohereEmbedResponse, style=ErrorStyle.COHERE),),
        style=ErrorStyle.COHERE,
    ),
)

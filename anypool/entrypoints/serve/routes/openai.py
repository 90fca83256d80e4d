"""`/v1/embeddings`, `/pooling`, `/classify` and `/reward`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.responses import Response

from anypool.engine.request import Request
from anypool.engine.spans import SpannedPrompt
from anypool.entrypoints.serve.call import Call, Work
from anypool.entrypoints.serve.encoding import (
    Form,
    Stamp,
    as_array,
    as_matrix,
    check_plain,
    json_answer,
    json_of,
    objects_answer,
    rows_answer,
    sparse_of,
    usage_of,
)
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from anypool.entrypoints.serve.schemas.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    PoolingRequest,
    PoolingResponse,
    RewardRequest,
    RewardResponse,
)
from anypool.entrypoints.serve.served import ServedModel
from anypool.errors import InvalidParameterError
from anypool.pooling.tasks import PoolingTask, encode2pooling_task, parse_task

Encode = Callable[[list[torch.Tensor], Stamp], Response]


def embeddings(asked: EmbeddingRequest, model: ServedModel) -> Work:
    """Vectors of texts, token ids or conversations."""
    encoding, dtype = asked.form
    form = Form(encoding=encoding, dtype=dtype, endianness=asked.endianness or "little")
    is_sparse = PoolingTask.EMBED not in model.engine.supported_tasks and model.gives_sparse_vectors
    if is_sparse:
        check_plain(form)
    if asked.late_chunking:
        requests = _late_chunks(asked, model)
    else:
        task = PoolingTask.SPARSE_EMBED if is_sparse else PoolingTask.EMBED
        requests = model.prepare(asked.input or [], task, asked)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        head, usage = stamp.head("embd"), usage_of(requests)
        if is_sparse:
            return objects_answer(list(map(sparse_of, results)), head, usage, kind="embedding", key="embedding")
        rows = as_array(results[0]) if asked.late_chunking else as_matrix(results)
        return rows_answer(list(rows), form, head, usage, kind="embedding", key="embedding")

    return Work(requests=requests, encode=encode)


def _late_chunks(asked: EmbeddingRequest, model: ServedModel) -> list[Request]:
    """One request for all texts, as they follow each other, with a vector for the place of each."""
    texts = [text for text in asked.input or [] if isinstance(text, str)]
    ends = list(itertools.accumulate(map(len, texts)))
    places = tuple(zip([0, *ends], ends, strict=False))
    try:
        prompt = SpannedPrompt("".join(texts), places, in_tokens=False)
        return model.prepare([prompt], PoolingTask.EMBED, asked)
    except InvalidParameterError as error:
        if error.param != "spans":
            raise
        raise InvalidParameterError(f"late_chunking: {error}", param="input") from error


def pooling(asked: PoolingRequest, model: ServedModel) -> Work:
    """Any task by its name, or several at once; with none, the task that the old name `encode` stands for."""
    task: PoolingTask | list[PoolingTask]
    if asked.task in (None, "encode"):
        task = encode2pooling_task(model.engine.supported_tasks)
    elif isinstance(asked.task, list):
        task = [parse_task(name) for name in asked.task]
    else:
        task = parse_task(asked.task or "")
    form = Form(
        encoding=asked.encoding_format or "float",
        dtype=asked.embed_dtype or "float32",
        endianness=asked.endianness or "little",
    )
    if isinstance(task, list) or task is PoolingTask.SPARSE_EMBED:
        check_plain(form)
    requests = model.prepare(asked.input or [], task, asked)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        head, usage = stamp.head("pool"), usage_of(requests)
        extras = [_tokens_of(request, model) for request in requests] if asked.return_token_ids else None
        if isinstance(task, list) or task is PoolingTask.SPARSE_EMBED:
            values = [_several(one) if isinstance(task, list) else sparse_of(one.results[0]) for one in requests]
            return objects_answer(values, head, usage, kind="pooling", key="data", extras=extras)
        rows = [as_array(result) for result in results]
        return rows_answer(rows, form, head, usage, kind="pooling", key="data", shapes=True, extras=extras)

    return Work(requests=requests, encode=encode)


def _several(request: Request) -> dict[str, Any]:
    """The results of all tasks of a request, by the task's name."""
    every = zip((request, *request.also), request.results, strict=True)
    return {one.plan.task.value: _result(one, result) for one, result in every}


def _result(request: Request, result: torch.Tensor) -> Any:
    return sparse_of(result) if request.plan.task is PoolingTask.SPARSE_EMBED else json_of(as_array(result))


def _tokens_of(request: Request, model: ServedModel) -> dict[str, Any]:
    """The ids that were run; of rows per token, to which of the ids they belong, where some have none, and which of
    them are the patches of images.
    """
    ids, multi_vector, plan = request.token_ids, model.engine.loaded.multi_vector, request.plan
    found: dict[str, Any] = {"prompt_token_ids": ids}
    if multi_vector is not None and plan.task is PoolingTask.TOKEN_EMBED and plan.token_pooling is None:
        kept = multi_vector.side(is_query=plan.is_query).kept
        found["row_places"] = [place for place, one in enumerate(ids) if kept.keeps(one)]
    elif request.images is not None and plan.task is PoolingTask.TOKEN_EMBED and plan.token_pooling is None:
        grids = request.images.grids
        found["image_grids"] = grids and [
            {"rows": one.rows, "columns": one.columns, "first_row": one.first} for one in grids
        ]
    return found


def classify(asked: ClassifyRequest, model: ServedModel) -> Work:
    """Labels of texts, and the scores of all labels."""
    requests = model.prepare(asked.input or [], PoolingTask.CLASSIFY, asked)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        data = []
        for index, (request, result) in enumerate(zip(requests, results, strict=True)):
            probs = as_array(result)
            label = model.labels(request, len(probs))[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": json_of(probs), "num_classes": len(probs)})
        return json_answer({**stamp.head("classify"), "data": data, "usage": usage_of(requests)})

    return Work(requests=requests, encode=encode)


def reward(asked: RewardRequest, model: ServedModel) -> Work:
    """Rewards of texts."""
    requests = model.prepare(asked.input or [], PoolingTask.REWARD, asked)
    return Work(requests=requests, encode=_encode_rewards(requests))


def _encode_rewards(requests: list[Request]) -> Encode:
    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        data = [
            {"object": "reward", "index": index, "reward": json_of(_reward_of(as_array(result)))}
            for index, result in enumerate(results)
        ]
        return json_answer({**stamp.head("reward"), "data": data, "usage": usage_of(requests)})

    return encode


def _reward_of(rows: NDArray[np.float32]) -> Any:
    """A number for a text, numbers for its steps, or rows as they are."""
    if rows.shape == (1,):
        return rows[0]
    return np.ascontiguousarray(rows[:, 0]) if rows.ndim == 2 and rows.shape[1] == 1 else rows


ROUTES = (
    Route(
        paths=("/v1/embeddings", "/embeddings"),
        summary="Embeds texts, token ids or conversations",
        calls=(Call(EmbeddingRequest, embeddings, EmbeddingResponse),),
    ),
    Route(
        paths=("/pooling",),
        summary="Runs any task of the model",
        calls=(Call(PoolingRequest, pooling, PoolingResponse),),
    ),
    Route(
        paths=("/classify",),
        summary="Labels texts",
        calls=(Call(ClassifyRequest, classify, ClassifyResponse),),
    ),
    Route(
        paths=("/reward",),
        summary="Rewards texts, or the steps in them",
        calls=(Call(RewardRequest, reward, RewardResponse),),
    ),
)

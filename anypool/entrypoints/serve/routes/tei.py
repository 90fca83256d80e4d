"""The routes of text-embeddings-inference: `/embed`, `/embed_all`, `/embed_sparse`, `/predict`, `/similarity`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import torch
from starlette.responses import Response

from anypool.entrypoints.serve.call import Call, Work
from anypool.entrypoints.serve.encoding import Stamp, as_array, as_matrix, json_answer, json_of, pairs_of
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes.scoring import best_first, prepare_scores
from anypool.entrypoints.serve.schemas.tei import (
    Predictions,
    PredictRequest,
    Scores,
    SimilarityParameters,
    SimilarityRequest,
    SparseVectors,
    TEIRequest,
    TokenVectors,
    Vectors,
)
from anypool.entrypoints.serve.served import ServedModel
from anypool.pooling.tasks import PoolingTask


def embed(asked: TEIRequest, model: ServedModel) -> Work:
    """A vector per input."""
    options = model.prompt_options(asked)
    params = asked.pooling_params
    if params.normalize is None and params.use_activation is None:
        params = replace(params, normalize=True)
    requests = model.requests(asked.inputs, PoolingTask.EMBED, params, options)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer([json_of(row) for row in as_matrix(results)])

    return Work(requests=requests, encode=encode)


def embed_all(asked: TEIRequest, model: ServedModel) -> Work:
    """A vector per token of each input; not scaled unless that is asked for, but for those of a multi-vector model."""
    options = model.prompt_options(asked)
    params = model.params(asked, PoolingTask.TOKEN_EMBED)
    if params.normalize is None and params.use_activation is None and model.engine.loaded.multi_vector is None:
        params = replace(params, normalize=False)
    requests = model.requests(asked.inputs, PoolingTask.TOKEN_EMBED, params, options)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer([json_of(as_array(result)) for result in results])

    return Work(requests=requests, encode=encode)


def embed_sparse(asked: TEIRequest, model: ServedModel) -> Work:
    """A sparse vector per input."""
    options = model.prompt_options(asked)
    params = model.params(asked, PoolingTask.SPARSE_EMBED)
    requests = model.requests(asked.inputs, PoolingTask.SPARSE_EMBED, params, options)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer([orjson.Fragment(pairs_of(result)) for result in results])

    return Work(requests=requests, encode=encode)


def predict(asked: PredictRequest, model: ServedModel) -> Work:
    """The labels of texts or pairs of texts, the highest score first."""
    inputs, is_one = asked.inputs
    prompts = [{"prompt": one[0], "text_pair": one[1]} if isinstance(one, list) else one for one in inputs]
    options = model.prompt_options(asked)
    requests = model.requests(prompts, PoolingTask.CLASSIFY, asked.pooling_params, options)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        predictions = []
        for request, result in zip(requests, results, strict=True):
            scores = as_array(result)
            labels = model.labels(request, len(scores))
            predictions.append([{"label": labels[i], "score": scores[i]} for i in best_first(scores)])
        return json_answer(predictions[0] if is_one else predictions)

    return Work(requests=requests, encode=encode)


def similarity(asked: SimilarityRequest, model: ServedModel) -> Work:
    """How similar sentences are to one."""
    sentences = asked.inputs.sentences
    own = {name: getattr(asked, name) for name in asked.model_fields_set - {"inputs", "parameters"}}
    fields = (asked.parameters or SimilarityParameters.model_validate({})).model_copy(update=own)
    left = [asked.inputs.source_sentence] * len(sentences)
    scoring = prepare_scores(fields, model, left, sentences, roles=False)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer(np.ascontiguousarray(scoring.scores(results)))

    return Work(requests=scoring.requests, encode=encode, cut=scoring.cut)


def _route(path: str, summary: str, call: Call) -> Route:
    return Route(paths=(path,), summary=summary, calls=(call,), style=ErrorStyle.TEI)


ROUTES = (
    _route("/embed", "Embeds inputs", Call(TEIRequest, embed, Vectors, style=ErrorStyle.TEI)),
    _route(
        "/embed_all", "Embeds each token of inputs", Call(TEIRequest, embed_all, TokenVectors, style=ErrorStyle.TEI)
    ),
    _route(
        "/embed_sparse",
        "Embeds inputs as sparse vectors",
        Call(TEIRequest, embed_sparse, SparseVectors, style=ErrorStyle.TEI),
    ),
    _route("/predict", "Labels inputs", Call(PredictRequest, predict, Predictions, style=ErrorStyle.TEI)),
    _route(
        "/similarity", "Compares sentences with one", Call(SimilarityRequest, similarity, Scores, style=ErrorStyle.TEI)
    ),
)

"""`POST /invocations` and `POST /`: one route for every task, told apart by the body and the model.

The first is SageMaker's name for it, the second what text-embeddings-inference has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anypool.entrypoints.serve.call import Call, has
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes import cohere, openai, scoring, tei
from anypool.entrypoints.serve.schemas.cohere import CohereEmbedRequest, CohereEmbedResponse
from anypool.entrypoints.serve.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from anypool.entrypoints.serve.schemas.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    PoolingRequest,
    PoolingResponse,
    RewardRequest,
    RewardResponse,
)
from anypool.entrypoints.serve.schemas.scoring import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from anypool.entrypoints.serve.schemas.tei import (
    Predictions,
    PredictRequest,
    Ranks,
    Scores,
    SimilarityRequest,
    SparseVectors,
    TEIRequest,
    TEIRerankRequest,
    TokenVectors,
    Vectors,
)
from anypool.entrypoints.serve.served import ServedModel
from anypool.pooling.tasks import PoolingTask

_SPARSE, _TOKENS = PoolingTask.SPARSE_EMBED, PoolingTask.TOKEN_EMBED
_TASKS = {task.value for task in PoolingTask}


def _is_scored(body: Mapping[str, Any], model: ServedModel) -> bool:
    return any(name in body for name in ("queries", "data_1", "text_1"))


def _names_a_task(body: Mapping[str, Any], model: ServedModel) -> bool:
    task = body.get("task")
    return isinstance(task, list) or (isinstance(task, str) and task in _TASKS)


def _is_compared(body: Mapping[str, Any], model: ServedModel) -> bool:
    return isinstance(body.get("inputs"), dict)


def _gives_only(task: PoolingTask) -> Callable[[Mapping[str, Any], ServedModel], bool]:
    """Whether a model has no one vector per text, and has this in its place."""

    def holds(body: Mapping[str, Any], model: ServedModel) -> bool:
        tasks = model.engine.supported_tasks
        return PoolingTask.EMBED not in tasks and task in tasks

    return holds


def _with_inputs(when: Callable[[Mapping[str, Any], ServedModel], bool]) -> Callable[..., bool]:
    return lambda body, model: "inputs" in body and when(body, model)


def _is_labelled(body: Mapping[str, Any], model: ServedModel) -> bool:
    return model.kind in ("classifier", "reranker")


def _is_predicted(body: Mapping[str, Any], model: ServedModel) -> bool:
    can = PoolingTask.CLASSIFY in model.engine.supported_tasks
    return "inputs" in body and can and model.kind != "embedding" and not _is_compared(body, model)


def _is_rewarded(body: Mapping[str, Any], model: ServedModel) -> bool:
    return model.kind == "reward"


_CALLS = (
    Call(TEIRerankRequest, scoring.rerank_texts, Ranks, ErrorStyle.TEI, has("query", "texts")),
    Call(RerankRequest, scoring.rerank, RerankResponse, when=has("query", "documents")),
    Call(ScoreRequest, scoring.score, ScoreResponse, when=_is_scored),
    Call(CohereEmbedRequest, cohere.embed, CohereEmbedResponse, ErrorStyle.COHERE, has("texts")),
    Call(PredictRequest, tei.predict, Predictions, ErrorStyle.TEI, _is_predicted),
    Call(SimilarityRequest, tei.similarity, Scores, ErrorStyle.TEI, _is_compared),
    Call(TEIRequest, tei.embed_sparse, SparseVectors, ErrorStyle.TEI, _with_inputs(_gives_only(_SPARSE))),
    Call(TEIRequest, tei.embed_all, TokenVectors, ErrorStyle.TEI, _with_inputs(_gives_only(_TOKENS))),
    Call(TEIRequest, tei.embed, Vectors, ErrorStyle.TEI, has("inputs")),
    Call(PoolingRequest, openai.pooling, PoolingResponse, when=_names_a_task),
    Call(ClassifyRequest, openai.classify, ClassifyResponse, when=_is_labelled),
    Call(RewardRequest, openai.reward, RewardResponse, when=_is_rewarded),
    Call(EmbeddingRequest, openai.embeddings, EmbeddingResponse, when=_gives_only(_SPARSE)),
    Call(PoolingRequest, openai.pooling, PoolingResponse, when=_gives_only(_TOKENS)),
    Call(EmbeddingRequest, openai.embeddings, EmbeddingResponse),
)

ROUTES = (Route(paths=("/invocations", "/"), summary="Whatever fits the body and the model", calls=_CALLS),)

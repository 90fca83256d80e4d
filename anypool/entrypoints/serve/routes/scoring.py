"""`/score` and `/rerank`, with the bodies of vLLM, Jina, Cohere and text-embeddings-inference."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from starlette.responses import Response

from anypool.adapters.rerank_templates import ChatTemplate
from anypool.adapters.template_limits import LONGEST_RENDER_S, at_most
from anypool.engine.prompts import ImagePrompt
from anypool.engine.request import Request
from anypool.entrypoints.scoring import as_pairs, plan_scores, reads_pairs
from anypool.entrypoints.serve.call import Call, Work, has
from anypool.entrypoints.serve.encoding import Stamp, json_answer, usage_of
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.common import raw
from anypool.entrypoints.serve.schemas.scoring import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from anypool.entrypoints.serve.schemas.tei import Ranks, TEIRerankRequest
from anypool.entrypoints.serve.served import ServedModel, refuse_template
from anypool.errors import InvalidParameterError
from anypool.pooling.params import PoolingParams

PairRequest = ScoreRequest | RerankRequest | TEIRerankRequest


@dataclass(frozen=True)
class Scoring:
    """Pairs that are about to be scored.

    Attributes:
        requests: What is run.
        cut: Tokens that were cut off texts before.
        scores: Results of the requests -> a score per pair.
    """

    requests: list[Request]
    cut: int
    scores: Any


def prepare_scores(asked: Any, model: ServedModel, left: list[Any], right: list[Any], *, roles: bool) -> Scoring:
    """Requests for the scores of pairs.

    Args:
        asked: Fields of the body.
        model: The model.
        left, right: The texts, or prompts with images, pair by pair.
        roles: Whether the left are queries and the right documents.
    """
    side = model.prompt_options(asked)
    for index, text in enumerate((*dict.fromkeys(left), *right)):
        model.check_length(text, index)
    left, cut_left = _shorten(model, left, getattr(asked, "max_tokens_per_query", None), side.truncation_side)
    right, cut_right = _shorten(model, right, getattr(asked, "max_tokens_per_doc", None), side.truncation_side)
    params = _params(asked, model)
    template = _template(asked, model)
    with at_most(LONGEST_RENDER_S) if template is not None else nullcontext():
        plan = plan_scores(
            model.engine,
            left,
            right,
            params=params,
            options=side,
            template=template,
            instruction=getattr(asked, "asked_instruction", None),
            roles=roles,
            fuse=getattr(asked, "fuse", None) or False,
        )
    prepared = [model.engine.prepare(job.prompts, job.task, job.params, job.options) for job in plan.jobs]

    def scores(results: list[torch.Tensor]) -> np.ndarray:
        rest = iter(results)
        ran = [(requests, [next(rest) for _ in requests]) for requests in prepared]
        return np.array([float(score) for score, _ in plan.finish(ran)], np.float32)

    return Scoring([one for requests in prepared for one in requests], cut_left + cut_right, scores)


def _params(asked: Any, model: ServedModel) -> PoolingParams:
    """What is asked of the scores; raw ones mean nothing where embeddings are compared."""
    params: PoolingParams = asked.pooling_params
    if getattr(asked, "raw_scores", None) and reads_pairs(model.engine):
        return raw(params)
    return params


def _template(asked: Any, model: ServedModel) -> ChatTemplate | None:
    text = getattr(asked, "chat_template", None)
    if text is None:
        return None
    refuse_template(trusted=model.trusts_templates)
    if "{" not in text:  # a file's name, which is for whoever starts the server
        raise InvalidParameterError("chat_template is not a Jinja template", param="chat_template")
    return ChatTemplate(text)


def _shorten(model: ServedModel, texts: list[Any], limit: int | None, side: str | None) -> tuple[list[Any], int]:
    """Texts of at most so many tokens, and how many were cut off; each distinct text counts once."""
    if not limit:
        return texts, 0
    tokenizer = model.tokenizer
    kept = {
        text: tokenizer.shorten(text, limit, side=side or tokenizer.truncation_side) if is_text(text) else (text, 0)
        for text in dict.fromkeys(texts)
    }
    return [kept[text][0] for text in texts], sum(cut for _, cut in kept.values())


def score(asked: ScoreRequest, model: ServedModel) -> Work:
    """How well texts fit, pair by pair."""
    left, right = as_pairs(*([model.with_images(one) for one in side] for side in asked.sides))
    scoring = prepare_scores(asked, model, left, right, roles=False)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        data = [
            {"object": "score", "index": index, "score": value} for index, value in enumerate(scoring.scores(results))
        ]
        usage = usage_of(scoring.requests, cut=scoring.cut)
        return json_answer({**stamp.head("score"), "data": data, "usage": usage})

    return Work(requests=scoring.requests, encode=encode, cut=scoring.cut)


def rerank(asked: RerankRequest, model: ServedModel) -> Work:
    """Documents by how well they fit a query; their texts come back unless that is declined."""
    return _rerank(asked, model, returns_documents=asked.return_documents is not False)


def rerank_v2(asked: RerankRequest, model: ServedModel) -> Work:
    """The same; texts come back only where that is asked for, as in version 2 of Cohere's API."""
    return _rerank(asked, model, returns_documents=asked.return_documents is True)


def _rerank(asked: RerankRequest, model: ServedModel, *, returns_documents: bool) -> Work:
    documents = [model.with_images(one) for one in asked.documents]
    query = model.with_images(asked.query)
    scoring = prepare_scores(asked, model, [query] * len(documents), documents, roles=True)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        scores = scoring.scores(results)
        ranked = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": documents[index]}} if returns_documents and is_text(documents[index]) else {}),
            }
            for index in best_first(scores)[: asked.top_n or None]
        ]
        usage = usage_of(scoring.requests, cut=scoring.cut)
        billed = {"input_tokens": usage["prompt_tokens"], "search_units": 1}
        return json_answer(
            {
                **stamp.head("rerank"),
                "results": ranked,
                "usage": usage,
                "meta": {"api_version": {"version": "2"}, "billed_units": billed},
            }
        )

    return Work(requests=scoring.requests, encode=encode, cut=scoring.cut)


def rerank_texts(asked: TEIRerankRequest, model: ServedModel) -> Work:
    """The same with the fields of text-embeddings-inference."""
    scoring = prepare_scores(asked, model, [asked.query] * len(asked.texts), asked.texts, roles=True)

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        scores = scoring.scores(results)
        return json_answer(
            [
                {"index": index, "score": scores[index], **({"text": asked.texts[index]} if asked.return_text else {})}
                for index in best_first(scores)
            ]
        )

    return Work(requests=scoring.requests, encode=encode, cut=scoring.cut)


def is_text(document: str | ImagePrompt) -> bool:
    """Whether a document may be returned: an image is not."""
    return isinstance(document, str)


def best_first(scores: np.ndarray) -> list[int]:
    """Places of the scores, the highest first; equal ones stay in their order."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order


_SCORE = Call(ScoreRequest, score, ScoreResponse)
_TEXTS = Call(TEIRerankRequest, rerank_texts, Ranks, style=ErrorStyle.TEI, when=has("texts"))

ROUTES = (
    Route(paths=("/score", "/v1/score"), summary="Scores pairs of texts", calls=(_SCORE,)),
    Route(
        paths=("/rerank", "/v1/rerank"),
        summary="Orders documents by how well they fit a query",
        calls=(_TEXTS, Call(RerankRequest, rerank, RerankResponse)),
    ),
    Route(
        paths=("/v2/rerank",),
        summary="Orders documents by how well they fit a query, as Cohere's API does",
        calls=(Call(RerankRequest, rerank_v2, RerankResponse, style=ErrorStyle.COHERE),),
        style=ErrorStyle.COHERE,
    ),
)

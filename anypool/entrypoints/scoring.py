"""`score` and `rerank`: calls built on the tasks, by what the model is.

A cross-encoder reads both texts together, a reranker that is a prompt program reads them in its template, an embedding
model compares vectors, and a late-interaction model compares token vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch

from anypool.adapters.rerank_templates import ChatTemplate, RerankTemplate, TemplatedPrompt
from anypool.config import is_number
from anypool.engine.engine import Engine
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import ImagePrompt, Prompt, TextPair, as_image_prompt, check_text
from anypool.engine.request import Request
from anypool.entrypoints.listwise import count_cut, list_scores, listwise_options, listwise_params, plan_lists
from anypool.errors import InvalidParameterError, InvalidPromptError, UnsupportedTaskError
from anypool.kernels.maxsim import maxsim
from anypool.model_executor.cpu import run_apart
from anypool.pooling.params import PoolingParams
from anypool.pooling.similarity import similarity
from anypool.pooling.sparse import unpack_weights
from anypool.pooling.tasks import PoolingTask

# Requests and their results.
Ran = tuple[list[Request], list[torch.Tensor]]
# Runs prompts of one task: requests and results in the order given.
Run = Callable[
    [
        Sequence[Prompt | TextPair | TemplatedPrompt],
        PoolingTask | Sequence[PoolingTask],
        PoolingParams | None,
        PromptOptions,
    ],
    Ran,
]
# Per pair: the score, and the requests it came from.
Scores = list[tuple[torch.Tensor, list[Request]]]

# Names under which checkpoints keep a prompt for documents; the first that has a text is taken.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# What a fused score is made of, and the weights that BGE-M3's model card names.
_FUSED_TASKS = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.TOKEN_EMBED)
_FUSION_WEIGHTS = (0.4, 0.2, 0.4)


@dataclass(frozen=True)
class Job:
    """Prompts that are run for scores."""

    prompts: Sequence[Any]
    task: PoolingTask | Sequence[PoolingTask]
    params: PoolingParams | None
    options: PromptOptions


@dataclass(frozen=True)
class ScoringPlan:
    """What has to be run for scores, and what makes scores of the results, one entry per job."""

    jobs: tuple[Job, ...]
    finish: Callable[[Sequence[Ran]], Scores]


class Side(NamedTuple):
    """A text of a pair: its request, and the result of that."""

    request: Request
    result: torch.Tensor


def as_pairs(data_1: Any, data_2: Any) -> tuple[list[Any], list[Any]]:
    """Both sides as lists of one length: 1:1, 1:N or N:N; of texts, and of prompts with images as `ImagePrompt`s.

    Raises:
        InvalidPromptError: A side is not texts, or the lengths do not fit.
    """
    left, right = (_texts(data, name) for data, name in ((data_1, "data_1"), (data_2, "data_2")))
    if len(left) == 1 and len(right) != 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidPromptError(
            f"{len(left)} texts cannot be paired with {len(right)}: give one and any number, or as many on both sides"
        )
    return left, right


def as_query_and_documents(query: Any, documents: Any) -> tuple[list[Any], list[Any]]:
    """The query once per document, and the documents; each a text, or an `ImagePrompt` where it has images.

    Raises:
        InvalidPromptError: The query is neither, or the documents are not a list of them.
    """
    if _has_images(query):
        query = as_image_prompt(query, "query")
    elif isinstance(query, str):
        check_text(query, "query")
    elif not isinstance(query, ImagePrompt):
        raise InvalidPromptError(f"query={query!r} is not a text", param="query")
    if isinstance(documents, str) or _has_images(documents):
        raise InvalidPromptError(f"documents={documents!r} is one text; give a list of texts", param="documents")
    listed = _texts(documents, "documents")
    return [query] * len(listed), listed


def _texts(data: Any, name: str) -> list[Any]:
    given: Any = [data] if isinstance(data, (str, ImagePrompt)) or _has_images(data) else data
    given = given.tolist() if hasattr(given, "tolist") else given  # numpy arrays of texts, and columns of tables
    if not isinstance(given, (Sequence, Iterator, ValuesView)) or isinstance(given, (bytes, bytearray, memoryview)):
        raise InvalidPromptError(
            f"{name} must be a text or a list of texts, and is of type {type(data).__name__}", param=name
        )
    return [_text(one, name, index) for index, one in enumerate(given)]


def _text(one: Any, name: str, index: int) -> str | ImagePrompt:
    if isinstance(one, ImagePrompt):
        return one
    if _has_images(one):
        return as_image_prompt(one, f"{name} {index}")
    if not isinstance(one, str):
        raise InvalidPromptError(f"{name} has {one!r} at {index}, which is not a text", param=name)
    return check_text(one, f"{name} {index}")


def _has_images(one: object) -> bool:
    return isinstance(one, Mapping) and "multi_modal_data" in one


def score_pairs(
    engine: Engine,
    run: Run,
    left: list[str],
    right: list[str],
    *,
    params: PoolingParams | None,
    options: PromptOptions,
    template: ChatTemplate | None = None,
    instruction: str | None = None,
    roles: bool = False,
    fuse: bool | Sequence[float] = False,
) -> Scores:
    """Plans the scores of pairs of texts and runs what they need; arguments and errors as for `plan_scores`."""
    plan = plan_scores(
        engine,
        left,
        right,
        params=params,
        options=options,
        template=template,
        instruction=instruction,
        roles=roles,
        fuse=fuse,
    )
    return plan.finish([run(job.prompts, job.task, job.params, job.options) for job in plan.jobs])


def plan_scores(
    engine: Engine,
    left: list[str],
    right: list[str],
    *,
    params: PoolingParams | None,
    options: PromptOptions,
    template: ChatTemplate | None = None,
    instruction: str | None = None,
    roles: bool = False,
    fuse: bool | Sequence[float] = False,
) -> ScoringPlan:
    """What has to be run to score pairs of texts.

    Args:
        engine: The engine.
        left, right: The texts, pair by pair.
        params: Of the scores, or of the embeddings that are compared.
        options: How texts become token ids.
        template: In place of the model's own.
        instruction: For templates that take one.
        roles: Whether the left are queries and the right documents, so that an embedding model's prompts apply.
        fuse: For a model with dense, sparse and token vectors: their weights in one score, True for the usual ones.

    Raises:
        InvalidParameterError: A template or instruction is given to a model that reads none, or weights to one that
            lacks a kind of vector.
        UnsupportedTaskError: The model gives several labels, of which none is the score.
    """
    loaded = engine.loaded
    if is_listwise(engine):
        return _lists(engine, left, right, params, options, template, instruction, fuse)
    if fuse is not False:
        return _fused(engine, left, right, params, options, roles, _fusion_weights(engine, fuse))
    if reads_pairs(engine):
        if any(isinstance(one, ImagePrompt) for one in (*left, *right)):
            raise InvalidPromptError(f"{loaded.config.name} reads pairs of texts, and there is an image among them")
        scores = loaded.defaults.scores[PoolingTask.CLASSIFY]
        if scores.columns != 1:
            raise UnsupportedTaskError(
                f"{loaded.config.name} has {scores.columns} labels, and a score is one number: "
                "call classify([{'prompt': first, 'text_pair': second}]) and choose a label",
                param="task",
            )
        pairs = _pairs(engine, left, right, template or loaded.rerank_template, instruction, options)
        return ScoringPlan((Job(pairs, PoolingTask.CLASSIFY, params, options),), _one_score_each)
    for name, given in (("chat_template", template), ("instruction", instruction)):
        if given is not None:
            raise InvalidParameterError(
                f"{loaded.config.name} reads each text by itself, so it takes no {name}", param=name
            )
    if _compares_tokens(engine):
        return _late_interaction(engine, left, right, params, options)
    if PoolingTask.EMBED not in loaded.defaults.tasks and loaded.defaults.sparse is not None:
        return _sparse_vectors(engine, left, right, params, options)
    return _embeddings(engine, left, right, params, options, roles)


def is_listwise(engine: Engine) -> bool:
    """Whether the model reads all documents of a query at once."""
    multi_vector = engine.loaded.multi_vector
    return multi_vector is not None and multi_vector.recipe.is_listwise


def reads_pairs(engine: Engine) -> bool:
    """Whether the model reads both texts of a pair together, rather than each by itself."""
    loaded = engine.loaded
    scores = loaded.defaults.scores.get(PoolingTask.CLASSIFY)
    # A class with a pooler of its own may classify single texts and embed them as well.
    return not (_compares_tokens(engine) or scores is None or (loaded.head is None and scores.columns != 1))


def _compares_tokens(engine: Engine) -> bool:
    return engine.loaded.facts.score_type == "late-interaction"


def _lists(
    engine: Engine,
    left: list[str],
    right: list[str],
    params: PoolingParams | None,
    options: PromptOptions,
    template: ChatTemplate | None,
    instruction: str | None,
    fuse: bool | Sequence[float],
) -> ScoringPlan:
    """The documents of each query as a list, which is run in as many prompts as it takes."""
    name = engine.loaded.config.name
    for field, given in (("chat_template", template), ("fuse", fuse or None)):
        if given is not None:
            raise InvalidParameterError(f"{name} reads a list of documents, so it takes no {field}", param=field)
    if any(isinstance(one, ImagePrompt) for one in (*left, *right)):
        raise InvalidPromptError(f"{name} reads texts, and there is an image among them")
    vectors = listwise_params(params, name)
    lists = plan_lists(engine, left, right, options, instruction)
    prompts = [block.prompt for blocks in lists for block in blocks]

    def finish(ran: Sequence[Ran]) -> Scores:
        [(requests, results)] = ran
        found: dict[int, tuple[torch.Tensor, list[Request]]] = {}
        run = zip(requests, results, strict=True)
        for blocks in lists:
            own = [next(run) for _ in blocks]
            scores = run_apart(partial(list_scores, blocks, [rows for _, rows in own]))
            for block, (request, _) in zip(blocks, own, strict=True):
                count_cut(block, request)
                found |= {index: (scores[index], [request]) for index in block.pairs}
        return [found[index] for index in range(len(left))]

    return ScoringPlan((Job(prompts, PoolingTask.TOKEN_EMBED, vectors, listwise_options(options)),), finish)


def _one_score_each(ran: Sequence[Ran]) -> Scores:
    [(requests, results)] = ran
    return [(result[0], [request]) for request, result in zip(requests, results, strict=True)]


def _pairs(
    engine: Engine,
    left: list[str],
    right: list[str],
    template: RerankTemplate | None,
    instruction: str | None,
    options: PromptOptions,
) -> Sequence[TextPair | TemplatedPrompt]:
    """What a cross-encoder reads of each pair: both texts, or its template filled with them.

    A prompt of the checkpoint's stands before the first text of a pair. In a template it is the instruction.
    """
    texts = zip(left, right, strict=True)
    if template is None:
        if instruction is not None:
            raise InvalidParameterError(
                f"{engine.loaded.config.name} reads pairs without a template, so it takes no instruction",
                param="instruction",
            )
        return [TextPair(query, document) for query, document in texts]
    if instruction is not None and (options.prompt is not None or options.prompt_name is not None):
        raise InvalidParameterError(
            "in a template the prompt is the instruction: give instruction, prompt or prompt_name", param="instruction"
        )
    if instruction is None:
        instruction = engine.prompt_text(options) or None
    if isinstance(template, ChatTemplate) and engine.tokenizer is not None:
        template = template.bind(engine.tokenizer.named_tokens)
    return [template.render(query, document, instruction) for query, document in texts]


def _embeddings(
    engine: Engine,
    left: list[str],
    right: list[str],
    params: PoolingParams | None,
    options: PromptOptions,
    roles: bool,
) -> ScoringPlan:
    compare = similarity(engine.loaded.recipe.similarity_fn_name)
    has_sides = engine.loaded.defaults.sides is not None
    jobs = _sides(engine, left, right, PoolingTask.EMBED, params, options, roles and not has_sides)
    if has_sides:
        jobs = _routed(jobs)

    def scores(pairs: Sequence[tuple[Side, Side]]) -> Iterable[torch.Tensor]:
        return compare(torch.stack([a.result for a, _ in pairs]), torch.stack([b.result for _, b in pairs]))

    return _compared(jobs, left, right, scores)


def _sides(
    engine: Engine,
    left: list[str],
    right: list[str],
    task: PoolingTask | Sequence[PoolingTask],
    params: PoolingParams | None,
    options: PromptOptions,
    roles: bool,
) -> list[Job]:
    """A job for each side of the pairs, in which each distinct text is run once, with its side's prompt and route."""
    recipe = engine.loaded.recipe
    by_user = options.prompt is not None or options.prompt_name is not None
    jobs = []
    for texts, names in ((left, ("query",)), (right, _DOCUMENT_PROMPTS)):
        chosen = options
        if roles and not by_user and names[0] in recipe.prompts:
            own = next((name for name in names if recipe.prompts.get(name)), names[0])
            chosen = replace(options, prompt_name=own)
        jobs.append(Job(list(dict.fromkeys(texts)), task, params, chosen))
    return jobs


def _routed(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with the first side as queries and the second as documents, which brings the prompts of either."""
    return [
        replace(job, params=replace(job.params or PoolingParams(), is_query=is_query))
        for job, is_query in zip(jobs, (True, False), strict=True)
    ]


def _sparse_vectors(
    engine: Engine, left: list[str], right: list[str], params: PoolingParams | None, options: PromptOptions
) -> ScoringPlan:
    """The similarity of sparse vectors of either side: their dot product, unless the checkpoint says another."""
    loaded = engine.loaded
    assert loaded.defaults.sparse is not None
    size = loaded.defaults.sparse.size
    compare = similarity(loaded.recipe.similarity_fn_name or "dot")
    jobs = _routed(_sides(engine, left, right, PoolingTask.SPARSE_EMBED, params, options, roles=False))

    def scores(pairs: Sequence[tuple[Side, Side]]) -> Iterable[torch.Tensor]:
        return [compare(_row(a.result, size), _row(b.result, size))[0] for a, b in pairs]

    return _compared(jobs, left, right, scores)


def _row(rows_K2: torch.Tensor, size: int) -> torch.Tensor:
    """A packed sparse vector as `[1, size]`."""
    indices_K, values_K = unpack_weights(rows_K2)
    return torch.zeros(1, size).index_copy_(1, indices_K.long(), values_K[None])


def _fusion_weights(engine: Engine, fuse: bool | Sequence[float]) -> tuple[float, ...]:
    loaded = engine.loaded
    missing = [task.value for task in _FUSED_TASKS if task not in loaded.defaults.tasks]
    if missing or loaded.multi_vector is not None:
        raise InvalidParameterError(
            f"fuse={fuse!r} needs a model that gives dense, sparse and token vectors of one text at once, such as "
            f"BGE-M3; {loaded.config.name} lacks {', '.join(missing) or 'token vectors of the same tokens'}",
            param="fuse",
        )
    if fuse is True:
        return _FUSION_WEIGHTS
    given = tuple(fuse) if isinstance(fuse, (list, tuple)) else ()
    if len(given) != 3 or not all(is_number(one) and one >= 0 for one in given) or not 0 < sum(given) < inf:
        raise InvalidParameterError(
            f"fuse={fuse!r} is neither True nor three weights, of dense, sparse and token vectors, that are not all 0",
            param="fuse",
        )
    return given


def _fused(
    engine: Engine,
    left: list[str],
    right: list[str],
    params: PoolingParams | None,
    options: PromptOptions,
    roles: bool,
    weights: tuple[float, ...],
) -> ScoringPlan:
    """Dot products of dense and of sparse vectors, and MaxSim per query token, averaged with weights.

    The formula is that of FlagEmbedding's `compute_score`. All three are made by one run of each text.
    """
    assert engine.loaded.defaults.sparse is not None
    size = engine.loaded.defaults.sparse.size
    jobs = _sides(engine, left, right, _FUSED_TASKS, params, options, roles)

    def score(query: Request, document: Request) -> torch.Tensor:
        (dense_E, sparse_K2, tokens_QE), (other_E, other_K2, tokens_DE) = query.results, document.results
        by_words = (_row(sparse_K2, size) * _row(other_K2, size)).sum()
        by_tokens = maxsim(tokens_QE, tokens_DE) / len(tokens_QE)
        kinds_3 = torch.stack([dense_E @ other_E, by_words, by_tokens])
        return (kinds_3 * torch.tensor(weights)).sum() / sum(weights)

    return _compared(jobs, left, right, lambda pairs: [score(a.request, b.request) for a, b in pairs])


def _compared(
    jobs: Sequence[Job],
    left: list[str],
    right: list[str],
    compare: Callable[[Sequence[tuple[Side, Side]]], Iterable[torch.Tensor]],
) -> ScoringPlan:
    """A plan whose two jobs run each distinct text of a side once, and whose scores compare both texts of each pair."""

    def finish(ran: Sequence[Ran]) -> Scores:
        of_left, of_right = (
            dict(zip(job.prompts, map(Side, *one), strict=True)) for job, one in zip(jobs, ran, strict=True)
        )
        pairs = [(of_left[a], of_right[b]) for a, b in zip(left, right, strict=True)]
        scores = run_apart(lambda: compare(pairs)) if pairs else []
        return [(score, [a.request, b.request]) for score, (a, b) in zip(scores, pairs, strict=True)]

    return ScoringPlan(tuple(jobs), finish)


def _late_interaction(
    engine: Engine, left: list[str], right: list[str], params: PoolingParams | None, options: PromptOptions
) -> ScoringPlan:
    """MaxSim of queries, on the left, with documents; each distinct text is run once."""
    multi_vector = engine.loaded.multi_vector
    of_queries = of_documents = params
    if multi_vector is not None:  # a class with a pooler of its own may know no sides
        asked = params or PoolingParams()
        of_queries = replace(asked, is_query=True, pool_factor=None, token_pooling=None)
        of_documents = replace(asked, is_query=False)
    jobs = [
        Job(list(dict.fromkeys(texts)), PoolingTask.TOKEN_EMBED, of_side, options)
        for texts, of_side in ((left, of_queries), (right, of_documents))
    ]
    by_mean = multi_vector is not None and multi_vector.recipe.similarity == "meanmaxsim"

    def scores(pairs: Sequence[tuple[Side, Side]]) -> Iterable[torch.Tensor]:
        return [maxsim(a.result, b.result) / (len(a.result) if by_mean else 1) for a, b in pairs]

    return _compared(jobs, left, right, scores)

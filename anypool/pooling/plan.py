"""A request's parameters, resolved against the engine's settings and the model: made before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from anypool.errors import InvalidParameterError, UnsupportedTaskError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask
from anypool.pooling.token_pooling import TokenPooling, token_pooling


@dataclass(frozen=True, kw_only=True)
class EmbeddingSize:
    """Which embedding sizes a model can give.

    Attributes:
        model: Name of the model, for messages.
        full: Size of the uncut embedding.
        allowed: The sizes it was trained to be cut to, beside the full one; None where the checkpoint names none, so
            that any cut is taken.
        cuttable: False where the checkpoint says that it must not be cut.
    """

    model: str
    full: int
    allowed: tuple[int, ...] | None = None
    cuttable: bool = True

    def check(self, dimensions: int) -> int:
        """Returns `dimensions`, or raises an `InvalidParameterError` that says what is allowed."""
        if not self.cuttable and dimensions != self.full:
            supported = str(self.full)
        elif self.allowed is not None:
            sizes = sorted({*(size for size in self.allowed if size < self.full), self.full})
            supported = "" if dimensions in sizes else ", ".join(map(str, sizes))
        else:
            supported = "" if 1 <= dimensions <= self.full else f"1 to {self.full}"
        if supported:
            raise InvalidParameterError(
                f"dimensions={dimensions} is not available for {self.model}: it supports {supported}",
                param="dimensions",
            )
        return dimensions


@dataclass(frozen=True, kw_only=True)
class ScoreDefaults:
    """How one task's scores are finished where a request says nothing.

    Attributes:
        activation: A name in `SCORE_ACTIVATIONS`.
        columns: How many scores there are, before any are chosen.
        token_level: Whether there is a row per token rather than one per text.
        step_tag_id: Keep only the tokens with this id; None keeps all.
        returned_columns: Columns kept before the activation; None keeps all.
        reported_column: The one column kept after the activation; None keeps all.
    """

    activation: str
    columns: int
    token_level: bool = False
    step_tag_id: int | None = None
    returned_columns: tuple[int, ...] | None = None
    reported_column: int | None = None


@dataclass(frozen=True, kw_only=True)
class SparseDefaults:
    """How a model makes sparse vectors where a request says nothing.

    Attributes:
        size: Length of the vectors: the vocabulary's, or the number of latent dimensions.
        max_active_dims: How many weights are kept; None keeps all.
        joins_windows: Whether the largest weights of a text's windows are the text's.
        looked_up: The values of `is_query` of texts that are looked up in a table rather than run.
        unrouted: Those of texts that the model has no way for.
    """

    size: int
    max_active_dims: int | None = None
    joins_windows: bool = True
    looked_up: frozenset[bool | None] = frozenset()
    unrouted: frozenset[bool | None] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TokenVectorDefaults:
    """What a request for the token vectors of a multi-vector model gets where it asks for nothing.

    Attributes:
        size: Sizes of the vectors.
        normalize: Whether they are normalised.
        dimensions: How many dimensions are kept; None keeps all.
        pooling: What is done to documents in the end.
        variant: The name in `TOKEN_POOLINGS` of the way of its library.
    """

    size: EmbeddingSize
    normalize: bool
    dimensions: int | None = None
    pooling: TokenPooling | None = None
    variant: str = "sentence-transformers"


@dataclass(frozen=True, kw_only=True)
class PoolingDefaults:
    """What a request gets where it asks for nothing: the engine's settings over the checkpoint's over the class's.

    Attributes:
        tasks: What the model serves.
        size: Sizes of its embeddings.
        normalize: Whether embeddings are normalised.
        dimensions: How many dimensions are kept; None keeps all.
        scores: Of each task that gives scores.
        logit_mean, logit_sigma: Calibration of scores before the activation.
        sparse: Of sparse vectors, where the model gives them.
        sides: The values of `is_query` that texts may have, where queries and documents have different heads.
        token_vectors: Of a multi-vector model.
        norms_before_cut: Whether embeddings are layer-normalised before they are cut.
    """

    tasks: tuple[PoolingTask, ...]
    size: EmbeddingSize
    normalize: bool
    dimensions: int | None = None
    scores: Mapping[PoolingTask, ScoreDefaults] = field(default_factory=dict)
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    sparse: SparseDefaults | None = None
    sides: frozenset[bool | None] | None = None
    token_vectors: TokenVectorDefaults | None = None
    norms_before_cut: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """What one request gets. Requests with equal plans share every step of the pooler.

    `spans` are ranges of tokens, first and one after the last; where there are some, each gets an embedding.
    `norms_before_cut` layer-normalises an embedding, without weights, before it is cut.
    """

    task: PoolingTask
    normalize: bool = False
    dimensions: int | None = None
    norms_before_cut: bool = False
    activation: str = "none"
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_columns: tuple[int, ...] | None = None
    reported_column: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    is_query: bool = False
    token_pooling: TokenPooling | None = None
    max_active_dims: int | None = None
    side: bool | None = None
    is_looked_up: bool = False


_EMBED_FIELDS = ("dimensions", "normalize", "use_activation")
_TOKEN_VECTOR_FIELDS = (*_EMBED_FIELDS, "is_query", "pool_factor", "token_pooling")
_SPARSE_FIELDS = ("max_active_dims", "is_query")
_SCORE_FIELDS = ("activation", "use_activation")
_TOKEN_SCORE_FIELDS = (*_SCORE_FIELDS, "step_tag_id", "returned_token_ids")


def make_plan(task: PoolingTask, params: PoolingParams, defaults: PoolingDefaults) -> PoolingPlan:
    """Resolves `params`; raises an `InvalidRequestError` naming the field that cannot be served."""
    if task not in defaults.tasks:
        raise UnsupportedTaskError(_not_served(task, defaults), param="task")
    if task is PoolingTask.SPARSE_EMBED:
        _only(params, _SPARSE_FIELDS, task)
        assert defaults.sparse is not None
        return _sparse_plan(params, defaults.sparse, defaults.size.model)
    scores = defaults.scores.get(task)
    if task is PoolingTask.TOKEN_EMBED and defaults.token_vectors is not None:
        _only(params, _TOKEN_VECTOR_FIELDS, task)
        return _token_vector_plan(params, defaults.token_vectors)
    if scores is None:
        _only(params, tuple(dict.fromkeys((*_EMBED_FIELDS, *_fields_of(task, defaults)))), task)
        return _embed_plan(task, params, defaults)
    _only(params, _TOKEN_SCORE_FIELDS if scores.token_level else _SCORE_FIELDS, task)
    columns = scores.returned_columns
    if params.returned_token_ids is not None:
        columns = _check_columns(params.returned_token_ids, scores)
    activation = "none" if params.use_activation is False else params.activation or scores.activation
    if params.activation is not None or params.returned_token_ids is not None:
        _refuse_softmax_of_one(activation, scores.columns if columns is None else len(columns))
    return PoolingPlan(
        task=task,
        activation=activation,
        logit_mean=defaults.logit_mean,
        logit_sigma=defaults.logit_sigma,
        step_tag_id=scores.step_tag_id if params.step_tag_id is None else params.step_tag_id,
        returned_columns=columns,
        reported_column=scores.reported_column if columns is None and activation != "none" else None,
    )


def _sparse_plan(params: PoolingParams, defaults: SparseDefaults, model: str) -> PoolingPlan:
    _check_side(params.is_query, frozenset({True, False, None}) - defaults.unrouted, model)
    return PoolingPlan(
        task=PoolingTask.SPARSE_EMBED,
        max_active_dims=params.max_active_dims or defaults.max_active_dims,
        side=params.is_query,
        is_looked_up=params.is_query in defaults.looked_up,
    )


def _check_side(is_query: bool | None, sides: frozenset[bool | None], model: str) -> None:
    if is_query not in sides:
        raise InvalidParameterError(
            f"is_query={is_query} has no route in {model}: it has one for {' and '.join(sorted(map(str, sides)))}",
            param="is_query",
        )


def make_plans(
    tasks: Sequence[PoolingTask], params: PoolingParams, defaults: PoolingDefaults
) -> tuple[PoolingPlan, ...]:
    """A plan per task. Of several, each takes the fields of `params` that it knows, and each field needs one that does.

    Raises:
        InvalidRequestError: A field cannot be served, or a task stands twice.
    """
    if len(tasks) == 1:
        return (make_plan(tasks[0], params, defaults),)
    if not tasks or len(set(tasks)) < len(tasks):
        raise InvalidParameterError(
            f"the tasks are {[*map(str, tasks)]}: give each once, and at least one", param="task"
        )
    for task in tasks:
        if task not in defaults.tasks:
            raise UnsupportedTaskError(_not_served(task, defaults), param="task")
    taken = {task: _fields_of(task, defaults) for task in tasks}
    given = {one.name: getattr(params, one.name) for one in fields(params) if getattr(params, one.name) is not None}
    for name, value in given.items():
        if not any(name in known for known in taken.values()):
            raise InvalidParameterError(
                f"{name}={value!r} has no meaning for any of the tasks {', '.join(tasks)}", param=name
            )
    return tuple(
        make_plan(task, PoolingParams(**{name: value for name, value in given.items() if name in known}), defaults)
        for task, known in taken.items()
    )


def _fields_of(task: PoolingTask, defaults: PoolingDefaults) -> tuple[str, ...]:
    """The fields of `PoolingParams` that a task takes."""
    if task is PoolingTask.SPARSE_EMBED:
        return _SPARSE_FIELDS
    scores = defaults.scores.get(task)
    if scores is None:
        if task is not PoolingTask.EMBED:
            return tuple(name for name in _EMBED_FIELDS if name != "dimensions")
        return _EMBED_FIELDS if defaults.sides is None else (*_EMBED_FIELDS, "is_query")
    return _TOKEN_SCORE_FIELDS if scores.token_level else _SCORE_FIELDS


def _embed_plan(task: PoolingTask, params: PoolingParams, defaults: PoolingDefaults) -> PoolingPlan:
    asked = _asked_normalize(params)
    if task is PoolingTask.EMBED:
        dimensions = defaults.dimensions if params.dimensions is None else defaults.size.check(params.dimensions)
        if defaults.sides is not None:
            _check_side(params.is_query, defaults.sides, defaults.size.model)
        return PoolingPlan(
            task=task,
            normalize=defaults.normalize if asked is None else asked,
            dimensions=dimensions,
            norms_before_cut=defaults.norms_before_cut and dimensions not in (None, defaults.size.full),
            side=params.is_query,
        )
    if params.dimensions is not None:
        raise InvalidParameterError(
            f"dimensions={params.dimensions} has no meaning for task {task.value!r}; it goes with 'embed'",
            param="dimensions",
        )
    # Token vectors are normalised; the raw states that stand for a reward where there is no head are not.
    return PoolingPlan(task=task, normalize=task is PoolingTask.TOKEN_EMBED if asked is None else asked)


def _asked_normalize(params: PoolingParams) -> bool | None:
    if params.use_activation is None:
        return params.normalize
    if params.normalize is not None and params.normalize != params.use_activation:
        raise InvalidParameterError(
            f"normalize={params.normalize} and use_activation={params.use_activation} contradict each other",
            param="normalize",
        )
    return params.use_activation


def _token_vector_plan(params: PoolingParams, defaults: TokenVectorDefaults) -> PoolingPlan:
    asked = _asked_normalize(params)
    return PoolingPlan(
        task=PoolingTask.TOKEN_EMBED,
        normalize=defaults.normalize if asked is None else asked,
        dimensions=defaults.dimensions if params.dimensions is None else defaults.size.check(params.dimensions),
        is_query=params.is_query is True,
        token_pooling=_token_pooling(params, defaults),
    )


def _token_pooling(params: PoolingParams, defaults: TokenVectorDefaults) -> TokenPooling | None:
    """What is done to a document's vectors: the checkpoint's own way, or what is asked for in its place."""
    if params.pool_factor is None:
        if params.token_pooling is not None:
            raise InvalidParameterError(
                f"token_pooling={params.token_pooling!r} needs pool_factor, such as 2 for half as many vectors",
                param="token_pooling",
            )
        return None if params.is_query else defaults.pooling
    if params.is_query:
        raise InvalidParameterError(
            f"pool_factor={params.pool_factor} has no meaning for queries: only documents are pooled",
            param="pool_factor",
        )
    return token_pooling(params.token_pooling or defaults.variant, params.pool_factor)


def _only(params: PoolingParams, allowed: tuple[str, ...], task: PoolingTask) -> None:
    for one in fields(params):
        value = getattr(params, one.name)
        if value is not None and one.name not in allowed:
            raise InvalidParameterError(
                f"{one.name}={value!r} has no meaning for task {task.value!r}"
                f"{' of a model that is no multi-vector model' if one.name in _TOKEN_VECTOR_FIELDS[3:] else ''}, "
                f"which takes {', '.join(allowed)}",
                param=one.name,
            )


def _check_columns(asked: Sequence[int], scores: ScoreDefaults) -> tuple[int, ...]:
    for column in asked:
        if not 0 <= column < scores.columns:
            raise InvalidParameterError(
                f"returned_token_ids has {column}; the head has the columns 0 to {scores.columns - 1}",
                param="returned_token_ids",
            )
    if len(set(asked)) < len(asked):  # else a few bytes of a request could ask for any amount of memory
        raise InvalidParameterError(
            "returned_token_ids names a column twice: give each once", param="returned_token_ids"
        )
    return tuple(asked)


def _refuse_softmax_of_one(activation: str, columns: int) -> None:
    if activation == "softmax" and columns == 1:
        raise InvalidParameterError(
            "activation='softmax' of a single score is always 1: use 'sigmoid' or 'none', or keep several columns",
            param="activation",
        )


def _not_served(task: PoolingTask, defaults: PoolingDefaults) -> str:
    message = f"task {task.value!r} is not served by {defaults.size.model}; it serves {', '.join(defaults.tasks)}"
    if task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
        return (
            f"{message}. It needs a head: load a checkpoint saved as ...ForSequenceClassification or "
            "...ForTokenClassification, or make one from rows of a causal LM's head with "
            "hf_overrides={'classifier_from_token': [...], 'method': 'no_post_processing'}"
        )
    if task is PoolingTask.SPARSE_EMBED:
        return (
            f"{message}. It needs a sentence-transformers SparseEncoder, BGE-M3's files, or a ...ForMaskedLM loaded "
            "with convert='sparse'"
        )
    return message

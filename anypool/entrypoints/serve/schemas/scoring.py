"""`POST /score` and `/rerank`: vLLM's fields, and those of Jina and Cohere."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.chat import CONTENT_SCHEMA, check_images, least_size, read_content
from anypool.entrypoints.serve.schemas.common import CommonFields, Usage, check_count, kind_of
from anypool.errors import InvalidParameterError, InvalidPromptError

# The names of the two sides of a pair, in the order in which they are looked for.
_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


# A text, or the parts of a message with images.
Scored = str | list[dict[str, str]]


def _as_scored(one: object, where: str, field: str) -> Scored:
    """One text, or an object with a `text`, or with the `content` of a message."""
    if isinstance(one, str):
        return one
    if isinstance(one, dict) and isinstance(one.get("text"), str):
        return str(one["text"])
    if isinstance(one, dict) and "content" in one:
        return read_content(one["content"], f"{where}.content", field)
    raise InvalidPromptError(
        f"{where} is {kind_of(one)}; give a string, or an object with a text or a content", param=field
    )


def as_query(value: object, info: ValidationInfo) -> Scored:
    """One side of a pair.

    Raises:
        InvalidPromptError: It is neither a text nor a content.
    """
    field = info.field_name or "query"
    return _as_scored(value, field, field)


def as_side(value: object, info: ValidationInfo) -> list[Scored] | None:
    """One side of pairs: one text or content, or an array of them.

    Raises:
        InvalidPromptError: It is neither.
    """
    field = info.field_name or "texts"
    if value is None:
        return None
    if isinstance(value, (str, dict)):
        return [_as_scored(value, field, field)]
    if not isinstance(value, list):
        raise InvalidPromptError(f"{field} is {kind_of(value)}; give a string or an array of strings", param=field)
    return as_documents(value, info)


def as_documents(value: object, info: ValidationInfo) -> list[Scored]:
    """Documents: texts, or objects with a `text` or a `content`.

    Raises:
        InvalidPromptError: They are something else.
    """
    field = info.field_name or "documents"
    if not isinstance(value, list):
        raise InvalidPromptError(f"{field} is {kind_of(value)}; give an array of strings", param=field)
    check_count(value, field, info)
    return [_as_scored(one, f"{field}[{index}]", field) for index, one in enumerate(value)]


def _images_of(scored: Scored) -> int:
    return 0 if isinstance(scored, str) else sum(part["type"] == "image" for part in scored)


_CONTENT = {"type": "object", "properties": {"content": CONTENT_SCHEMA}, "required": ["content"]}
_WITH_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_SCORED = {"anyOf": [{"type": "string"}, _WITH_TEXT, _CONTENT]}
_ARRAY = {"type": "array", "items": _SCORED}
Query = Annotated[Scored, PlainValidator(as_query), WithJsonSchema(_SCORED)]
Side = Annotated[
    list[Scored], PlainValidator(as_side), WithJsonSchema({"anyOf": [{"type": "string"}, _CONTENT, _ARRAY]})
]
Documents = Annotated[list[Scored], PlainValidator(as_documents), WithJsonSchema(_ARRAY)]


class _PairFields(CommonFields):
    TRUNCATES: ClassVar[bool] = True

    max_tokens_per_query: int | None = Field(None, ge=0, description="Cut queries to this many tokens; 0 for no limit.")
    max_tokens_per_doc: int | None = Field(None, ge=0, description="Cut documents to this many tokens; 0 for no limit.")
    instruction: str | None = Field(None, description="For rerankers whose template takes one.")
    chat_template: str | None = Field(None, description="A Jinja template, where the server takes one from requests.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="`instruction` may stand here as well.")
    raw_scores: bool | None = Field(None, description="True for scores before the activation.")
    fuse: bool | list[float] | None = Field(
        None,
        description="For BGE-M3: the weights of dense, sparse and token vectors in one score; true for 0.4, 0.2, 0.4.",
    )

    @property
    def asked_instruction(self) -> str | None:
        """The instruction, wherever it stands."""
        variables = dict(self.chat_template_kwargs or {})
        given = variables.pop("instruction", None)
        if variables:
            name = next(iter(variables))
            raise InvalidParameterError(
                f"chat_template_kwargs has {name!r:.80}; only instruction is taken", param="chat_template_kwargs"
            )
        if given is not None and (self.instruction is not None or not isinstance(given, str)):
            raise InvalidParameterError("give one instruction, a text", param="instruction")
        return self.instruction if given is None else given


class ScoreRequest(_PairFields):
    """Pairs of texts or images, under one of four pairs of names: 1:1, 1:N or N:N."""

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None

    def model_post_init(self, context: Any) -> None:
        check_images(self._images, "documents", context)

    @property
    def _images(self) -> int:
        sides = (getattr(self, name) or () for name in dict.fromkeys(itertools.chain(*_SIDES)))
        return sum(_images_of(one) for side in sides for one in side)

    @property
    def least_size(self) -> int:
        return least_size(self._images)

    @property
    def sides(self) -> tuple[list[Scored], list[Scored]]:
        """Both sides.

        Raises:
            InvalidParameterError: A side is missing, or there under two names.
        """
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        for first, second in _SIDES:
            if given == {first, second}:
                return getattr(self, first), getattr(self, second)
        known = ", or ".join(f"{first} and {second}" for first, second in _SIDES)
        raise InvalidParameterError(f"the texts are missing, or there twice: give {known}", param="queries")


class ScoreData(BaseModel):
    """How well two texts fit."""

    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(BaseModel):
    """The scores, in the order of the pairs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: Usage


class RerankRequest(_PairFields):
    """A query, and documents that are ordered by how well they fit it."""

    query: Query
    documents: Documents
    top_n: int | None = Field(None, ge=0, description="How many to return; 0 and nothing for all.")
    return_documents: bool | None = Field(None, description="Whether the documents' texts are returned.")
    rank_fields: list[str] | None = Field(None, description="Only text is read.")
    max_chunks_per_doc: int | None = Field(None, description="Only 1 is served.")

    @property
    def _images(self) -> int:
        return sum(map(_images_of, (self.query, *self.documents)))

    @property
    def least_size(self) -> int:
        return least_size(self._images)

    def model_post_init(self, context: Any) -> None:
        check_images(self._images, "documents", context)
        for name, only in (("rank_fields", ["text"]), ("max_chunks_per_doc", 1)):
            if getattr(self, name) not in (None, only):
                raise InvalidParameterError(
                    f"{name}={getattr(self, name)!r:.80} is not supported: leave it out", param=name
                )


class RerankDocument(BaseModel):
    """A document's text."""

    text: str


class RerankItem(BaseModel):
    """A document's place among those given, and its score."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class BilledUnits(BaseModel):
    """What would be billed: nothing is."""

    input_tokens: int | None = None
    search_units: int | None = None


class ApiVersion(BaseModel):
    """Of Cohere's API."""

    version: str


class Meta(BaseModel):
    """What Cohere's clients read."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(BaseModel):
    """The documents, best first."""

    object: Literal["list"]
    id: str
    model: str
    results: list[RerankItem]
    usage: Usage
    meta: Meta

"""`POST /v2/embed`: Cohere's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.common import CommonFields, Texts, check_count, kind_of
from anypool.entrypoints.serve.schemas.scoring import Meta
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.pooling.params import PoolingParams

CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


def _texts_of_parts(value: object, info: ValidationInfo) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise InvalidPromptError(f"inputs is {kind_of(value)}; give an array", param="inputs")
    check_count(value, "inputs", info)
    return [_joined(one, f"inputs[{index}]") for index, one in enumerate(value)]


def _joined(item: Any, where: str) -> str:
    parts = item.get("content") if isinstance(item, dict) else None
    if not isinstance(parts, list) or not parts:
        raise InvalidPromptError(f"{where} has no content", param="inputs")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidPromptError(f"{where} holds something that is not text; only text is served", param="inputs")
    return "".join(part["text"] for part in parts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_INPUT = {"type": "object", "properties": {"content": {"type": "array", "items": _PART}}, "required": ["content"]}


class CohereEmbedRequest(CommonFields):
    """What is embedded, and into what."""

    TRUNCATES: ClassVar[bool] = True

    texts: Texts | None = None
    inputs: Annotated[
        list[str] | None,
        PlainValidator(_texts_of_parts),
        WithJsonSchema({"anyOf": [{"type": "array", "items": _INPUT}, {"type": "null"}]}),
    ] = None
    images: list[str] | None = Field(None, description="Not served.")
    embedding_types: list[CohereType] | None = Field(None, description="In what forms; float by default.")
    output_dimension: int | None = Field(None, description="How many leading dimensions to keep, before scaling.")
    max_tokens: int | None = Field(None, description="Cut longer texts to this many tokens.")

    def model_post_init(self, context: Any) -> None:
        if self.images:
            raise InvalidParameterError("images are not served here", param="images")
        if (self.texts is None) == (self.inputs is None):
            raise InvalidParameterError("give texts, or inputs", param="texts")
        if self.max_tokens is not None and self.truncate_prompt_tokens is not None:
            raise InvalidParameterError(
                "max_tokens and truncate_prompt_tokens say the same: give one", param="max_tokens"
            )
        if self.max_tokens is not None and self.truncate in (False, "NONE"):
            raise InvalidParameterError(
                f"truncate={self.truncate!r} contradicts max_tokens={self.max_tokens}", param="truncate"
            )

    @property
    def prompts(self) -> list[str]:
        return (self.texts if self.texts is not None else self.inputs) or []

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.output_dimension,
            normalize=self.normalize,
            activation=self.activation,
            use_activation=self.use_activation,
        )

    def _limit(self, in_windows: bool) -> int | None:
        return super()._limit(in_windows) if self.max_tokens is None else self.max_tokens


class CohereEmbeddings(BaseModel):
    """The vectors in each form that was asked for."""

    float: list[list[float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(BaseModel):
    """The vectors, in the order of the texts."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: Meta

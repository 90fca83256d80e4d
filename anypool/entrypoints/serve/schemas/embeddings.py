"""`POST /v1/embeddings`: OpenAI's fields, and those that this engine adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from anypool.engine.preparation import PromptOptions
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.pooling.params import PoolingParams

# Bounds what one request can cost in memory before the queue's own limit is asked.
MAX_INPUTS = 16_384

_FORMS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_INPUT_SCHEMA = {
    "title": "Input",
    "description": f"What is embedded: {_FORMS}.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_INPUTS},
        _IDS,
        {"type": "array", "items": _IDS, "maxItems": MAX_INPUTS},
    ],
}

# Fields that other servers know and that change the numbers: ignoring them would answer something else than was asked.
_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (None, True),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "little"),
    "messages": (None,),
    "use_activation": (None,),
}


def as_inputs(value: object) -> list[str] | list[list[int]]:
    """The prompts in `input`; a flat array of integers is one prompt.

    Raises:
        InvalidPromptError: It has none of the forms that the schema allows.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong(f"input is {_kind(value)}; give {_FORMS}")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    if len(value) > MAX_INPUTS:
        raise _wrong(f"input has {len(value):,} items, the limit is {MAX_INPUTS:,}: send several requests")
    if kinds == {list}:
        for index, ids in enumerate(value):
            _check_ids(ids, index)
    elif not kinds <= {str}:
        _refuse_items(value)
    return value


def _check_ids(ids: list[object], index: int) -> None:
    for place, item in enumerate(ids):
        if type(item) is not int:  # a bool is an int to isinstance
            raise _wrong(f"input[{index}][{place}] is {_kind(item)}; token ids are integers")


def _refuse_items(items: list[object]) -> None:
    for index, item in enumerate(items):
        if type(item) not in (str, int, list):
            raise _wrong(f"input[{index}] is {_kind(item)}; give {_FORMS}")
        if type(item) is not type(items[0]):
            raise _wrong(f"input[{index}] is {_kind(item)} and input[0] is {_kind(items[0])}; give {_FORMS}")


def _wrong(message: str) -> InvalidPromptError:
    return InvalidPromptError(message, param="input")


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    return "null" if value is None else "an object"


class EmbeddingRequest(BaseModel):
    """What is embedded, and how. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    input: Annotated[list[str] | list[list[int]], PlainValidator(as_inputs), WithJsonSchema(_INPUT_SCHEMA)]
    model: str | None = Field(None, description="The served model's name; may be left out.")
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="base64 is that of the vector's little-endian float32 bytes."
    )
    dimensions: int | None = Field(None, description="How many leading dimensions to keep.")
    user: str | None = Field(None, description="Taken for compatibility, and not used.")
    prompt_name: str | None = Field(None, description="Which of the model's prompts to put before each text.")
    normalize: bool | None = Field(None, description="Whether vectors are scaled to unit length.")
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Cut longer inputs to this many tokens; -1 for the model's limit. Without it they are refused.",
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Which end is cut.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_honoured(cls, fields: Any) -> Any:
        for name, allowed in _ONLY_VALUES.items():
            if fields.get(name) not in allowed:
                raise InvalidParameterError(f"{name}={fields[name]!r} is not supported: leave it out", param=name)
        return fields

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)

    @property
    def prompt_options(self) -> PromptOptions:
        return PromptOptions(
            prompt_name=self.prompt_name,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


class EmbeddingData(BaseModel):
    """One vector: numbers, or base64 of its little-endian float32 bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were run, special tokens included.

    `truncated_tokens` is there where something was cut off, and `split_inputs`, how many inputs were run in windows,
    where some were.
    """

    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int | None = None
    split_inputs: int | None = None


class EmbeddingResponse(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: Usage

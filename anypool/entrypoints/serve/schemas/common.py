"""Fields that every route takes, and the forms in which inputs are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema

from anypool.engine.prompt_options import PromptOptions
from anypool.entrypoints.serve.prompt_names import NamedPrompts
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.pooling.params import PoolingParams

_FORMS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_INPUTS_SCHEMA = {
    "description": f"What is run: {_FORMS}.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ],
}
_INT64 = 2**63
# How Cohere says whether an input is cut, and at which end.
_TRUNCATIONS = ("NONE", "START", "END")


def check_count(items: list[Any], field: str, info: ValidationInfo) -> None:
    """Refuses more items than the server takes in one request, before they are looked at."""
    most = (info.context or {}).get("max_inputs")
    if most is not None and len(items) > most:
        raise InvalidPromptError(
            f"{field} has {len(items):,} items, the limit is {most:,}: send several requests", param=field
        )


def as_inputs(value: object, info: ValidationInfo) -> list[str] | list[list[int]] | None:
    """The prompts of a field; a flat array of integers is one prompt.

    Raises:
        InvalidPromptError: It has none of the forms that the schema allows.
    """
    field = info.field_name or "input"
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidPromptError(f"{field} is {kind_of(value)}; give {_FORMS}", param=field)
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    check_count(value, field, info)
    if kinds == {list}:
        for index, ids in enumerate(value):
            _check_ids(ids, field, index)
    elif not kinds <= {str}:
        _refuse_items(value, field)
    return value


def _check_ids(ids: list[object], field: str, index: int) -> None:
    for place, item in enumerate(ids):
        if type(item) is not int:  # a bool is an int to isinstance
            raise InvalidPromptError(
                f"{field}[{index}][{place}] is {kind_of(item)}; token ids are integers", param=field
            )


def _refuse_items(items: list[object], field: str) -> None:
    for index, item in enumerate(items):
        if type(item) not in (str, int, list):
            raise InvalidPromptError(f"{field}[{index}] is {kind_of(item)}; give {_FORMS}", param=field)
        if type(item) is not type(items[0]):
            raise InvalidPromptError(
                f"{field}[{index}] is {kind_of(item)} and {field}[0] is {kind_of(items[0])}; give {_FORMS}",
                param=field,
            )


def as_texts(value: object, info: ValidationInfo) -> list[str] | None:
    """The texts of a field: one, or an array of them.

    Raises:
        InvalidPromptError: It is neither.
    """
    field = info.field_name or "texts"
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidPromptError(f"{field} is {kind_of(value)}; give a string or an array of strings", param=field)
    check_count(value, field, info)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidPromptError(f"{field}[{index}] is {kind_of(item)}; give a string", param=field)
    return value


def kind_of(value: object) -> str:
    """What a JSON value is, for messages."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    return "null" if value is None else "an object"


def as_truncate(value: object) -> object:
    """Whether inputs are cut, or at which end.

    Raises:
        InvalidParameterError: It is something else.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in _TRUNCATIONS):
        return value
    raise InvalidParameterError(
        f"truncate is {kind_of(value)}; give true, false, or one of {', '.join(_TRUNCATIONS)}", param="truncate"
    )


Truncate = Annotated[
    bool | str,
    PlainValidator(as_truncate),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(_TRUNCATIONS)}]}),
]
Inputs = Annotated[list[str] | list[list[int]], PlainValidator(as_inputs), WithJsonSchema(_INPUTS_SCHEMA)]
Texts = Annotated[
    list[str],
    PlainValidator(as_texts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class CommonFields(BaseModel):
    """What every route takes beside its inputs. Unknown fields are ignored, and null is as good as nothing.

    Attributes:
        TRUNCATES: What happens to an input that is too long where the request says nothing: it is cut, or refused.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    TRUNCATES: ClassVar[bool] = False

    model: str | None = Field(None, description="The served model's name; may be left out.")
    user: str | None = Field(None, description="Taken for compatibility, and not used.")
    request_id: str | None = Field(None, max_length=128, description="Part of the response's id.")
    prompt: str | None = Field(None, description="Text to put before each input.")
    prompt_name: str | None = Field(None, description="Which of the model's prompts to put before each input.")
    input_type: str | None = Field(
        None, description="What inputs are, such as search_query or search_document: the model's prompt for that."
    )
    task: str | None = Field(None, description="The same in other words, such as retrieval.query.")
    truncate: Truncate | None = Field(
        None, description="Whether inputs that are too long are cut to the model's limit, or where."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Cut longer inputs to this many tokens; -1 for the model's limit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Which end is cut.")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="The same as truncation_side."
    )
    normalize: bool | None = Field(None, description="Whether vectors are scaled to unit length.")
    activation: str | None = Field(None, description="What turns scores into probabilities.")
    use_activation: bool | None = Field(None, description="False for raw scores, and for vectors that are not scaled.")
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64, description="Smaller ones run earlier; 0 is usual.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Share cached prefixes only with requests of the same salt."
    )

    def prompt_options(self, prompts: NamedPrompts, *, in_windows: bool) -> PromptOptions:
        """How inputs become token ids.

        Args:
            prompts: The model's.
            in_windows: Whether inputs that are too long are run in windows rather than cut.

        Raises:
            InvalidParameterError: Two fields contradict each other, or there is no such prompt.
        """
        name, text = prompts.choose(
            prompt=self.prompt, prompt_name=self.prompt_name, input_type=self.input_type, task=self.asked_use
        )
        return PromptOptions(
            prompt_name=name,
            prompt=text,
            truncate_prompt_tokens=self._limit(in_windows),
            truncation_side=self._side,
            special_tokens=self.gets_special_tokens,
        )

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(normalize=self.normalize, activation=self.activation, use_activation=self.use_activation)

    @property
    def least_size(self) -> int:
        """How many characters preparing the inputs takes at least as long as, where the body does not tell."""
        return 0

    @property
    def asked_use(self) -> str | None:
        """What inputs are, where `task` says it."""
        return self.task

    @property
    def gets_special_tokens(self) -> bool:
        return True

    def _limit(self, in_windows: bool) -> int | None:
        if self.truncate_prompt_tokens is not None:
            if self.truncate in (False, "NONE"):
                raise InvalidParameterError(
                    f"truncate={self.truncate!r} contradicts truncate_prompt_tokens={self.truncate_prompt_tokens}",
                    param="truncate",
                )
            return self.truncate_prompt_tokens
        if self.truncate is None:
            return -1 if self.TRUNCATES and not in_windows else None
        return None if self.truncate in (False, "NONE") else -1

    @property
    def _side(self) -> str | None:
        sides = {
            "truncation_side": self.truncation_side,
            "truncation_direction": None if self.truncation_direction is None else self.truncation_direction.lower(),
            "truncate": {"START": "left", "END": "right"}.get(str(self.truncate)),
        }
        given = {name: side for name, side in sides.items() if side is not None}
        if len(set(given.values())) > 1:
            said = ", ".join(f"{name}={getattr(self, name)!r}" for name in given)
            raise InvalidParameterError(f"{said} contradict each other: give one", param=next(iter(given)))
        return next(iter(given.values()), None)


class TokenVectorFields(CommonFields):
    """Of routes that give the token vectors of multi-vector models."""

    is_query: bool | None = Field(None, description="For multi-vector models: whether inputs are queries.")
    pool_factor: float | None = Field(
        None, ge=1, strict=False, description="For documents of such a model: about how many vectors become one."
    )
    token_pooling: str | None = Field(None, description="How: sentence-transformers, pylate, pylate-1.3 or colpali.")


class LabelFields(CommonFields):
    """Of routes that label texts."""

    raw_scores: bool | None = Field(None, description="True for scores before the activation.")

    @property
    def pooling_params(self) -> PoolingParams:
        params = super().pooling_params
        return raw(params) if self.raw_scores else params


def raw(params: PoolingParams) -> PoolingParams:
    """For scores before the activation.

    Raises:
        InvalidParameterError: An activation is asked for as well.
    """
    if params.use_activation or params.activation is not None:
        raise InvalidParameterError("raw_scores=true contradicts the activation that is asked", param="raw_scores")
    return replace(params, use_activation=False)


class TokenDetails(BaseModel):
    """Of the tokens of the prompts, those whose keys were read from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens that were run, special tokens included.

    `truncated_tokens` is there where something was cut off, `split_inputs`, how many inputs were run in windows, where
    some were, and `prompt_tokens_details` where something was read from the prefix cache.
    """

    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int | None = None
    split_inputs: int | None = None
    prompt_tokens_details: TokenDetails | None = None

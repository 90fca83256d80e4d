"""`POST /tokenize`, `/detokenize` and `/decode`: vLLM's fields and those of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, RootModel, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.chat import ChatFields, Conversations
from anypool.entrypoints.serve.schemas.common import CommonFields, Texts, as_inputs, kind_of
from anypool.entrypoints.serve.schemas.tei import EmptyInputError
from anypool.errors import InvalidParameterError, InvalidPromptError


class TokenizeRequest(ChatFields):
    """A text under `prompt`, or `messages`."""

    prompt: str | None = Field(None, description="The text.")
    messages: Conversations | None = None
    return_token_strs: bool | None = Field(None, description="Whether the tokens are returned as texts as well.")

    def model_post_init(self, context: Any) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("give prompt, or messages", param="prompt")
        if self.messages is not None and len(self.messages) != 1:
            raise InvalidPromptError("messages holds several conversations; give one", param="messages")
        if self._images:
            raise InvalidPromptError("messages has an image, whose tokens are not text: leave it out", param="messages")


class TokenizeResponse(BaseModel):
    """The token ids of a text, special ones included."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TEITokenizeRequest(CommonFields):
    """Texts under `inputs`."""

    inputs: Texts
    add_special_tokens: bool = Field(True, description="Whether the special tokens around a text are returned.")

    def model_post_init(self, context: Any) -> None:
        if not self.inputs:
            raise EmptyInputError("inputs is empty", param="inputs")


class TokenPlace(BaseModel):
    """A token, and where it stands in the text in characters."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokenized(RootModel[list[list[TokenPlace]]]):
    """The tokens of each text."""


class DetokenizeRequest(CommonFields):
    """Token ids under `tokens`."""

    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str


def _as_id_lists(value: object, info: ValidationInfo) -> list[list[int]]:
    ids = as_inputs(value, info)
    if not ids or any(isinstance(one, str) for one in ids):
        raise InvalidPromptError(f"ids is {kind_of(value)}; give an array of token ids, or several", param="ids")
    return ids  # type: ignore[return-value]


_ID_LIST: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


class DecodeRequest(CommonFields):
    """Token ids under `ids`, one array or several."""

    ids: Annotated[
        list[list[int]],
        PlainValidator(_as_id_lists),
        WithJsonSchema({"anyOf": [_ID_LIST, {"type": "array", "items": _ID_LIST, "minItems": 1}]}),
    ]
    skip_special_tokens: bool = True


class Decoded(RootModel[list[str]]):
    """The text of each array of ids."""

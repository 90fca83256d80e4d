"""Inputs that are texts, token ids or conversations: what `/v1/embeddings` and its like take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.common import CommonFields, Inputs, check_count, kind_of
from anypool.errors import InvalidParameterError, InvalidPromptError

Conversation = list[dict[str, Any]]

_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        },
    },
    "required": ["role", "content"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}


def as_conversations(value: object, info: ValidationInfo) -> list[Conversation] | None:
    """One conversation, or an array of them, as an array; the content of each message is one text.

    Raises:
        InvalidPromptError: It has another form, or holds something that is not text.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise InvalidPromptError(f"messages is {kind_of(value)}; give an array of messages", param="messages")
    conversations = value if all(isinstance(one, list) for one in value) else [value]
    check_count(conversations, "messages", info)
    return [_conversation(one) for one in conversations]


def _conversation(messages: list[Any]) -> Conversation:
    if not messages:
        raise InvalidPromptError("messages holds an empty conversation", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidPromptError(
            f"{where} is {kind_of(message)}; give an object with role and content", param="messages"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidPromptError(f"{where}.content is {kind_of(content)}; give a string or parts", param="messages")
    return {**message, "content": content}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    raise InvalidPromptError(f"{where} is {kind!s:.80}; only text is served here", param="messages")


Conversations = Annotated[
    list[Conversation],
    PlainValidator(as_conversations),
    WithJsonSchema({"anyOf": [_MESSAGES, {"type": "array", "items": _MESSAGES}]}),
]


class ChatFields(CommonFields):
    """`input`, or `messages` with what says how they become a text."""

    input: Inputs | None = None
    messages: Conversations | None = Field(None, description="A conversation in place of input, or an array of them.")
    add_special_tokens: bool | None = Field(
        None, description="Whether special tokens are added; by default to texts, and not to conversations."
    )
    add_generation_prompt: bool = Field(False, description="Whether the beginning of an answer stands at the end.")
    continue_final_message: bool = Field(False, description="Whether the last message is left open.")
    chat_template: str | None = Field(None, description="A Jinja template, where the server takes one from requests.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the chat template sees.")

    def model_post_init(self, context: Any) -> None:
        if self.input is None and self.messages is None:
            raise InvalidParameterError("the field 'input' is missing", param="input")
        if self.input is not None and self.messages is not None:
            raise InvalidParameterError("input and messages are both given: give one", param="messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidParameterError(
                "add_generation_prompt and continue_final_message contradict each other", param="continue_final_message"
            )
        if self.messages is None and (self.chat_template is not None or self.chat_template_kwargs):
            raise InvalidParameterError("chat_template goes with messages", param="chat_template")

    @property
    def gets_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

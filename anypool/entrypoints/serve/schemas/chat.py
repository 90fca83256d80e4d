"""Inputs that are texts, token ids or conversations: what `/v1/embeddings` and its like take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.common import CommonFields, Inputs, check_count, kind_of
from anypool.errors import InvalidParameterError, InvalidPromptError

Conversation = list[dict[str, Any]]

# An image is fetched, decoded and resized, off the event loop and never together with small calls.
_IMAGE_SIZE = 32_768

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_URL = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
_IMAGE_PART = {
    "type": "object",
    "properties": {"type": {"const": "image_url"}, "image_url": _URL},
    "required": ["type", "image_url"],
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "content": CONTENT_SCHEMA,
    },
    "required": ["role", "content"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}


def as_conversations(value: object, info: ValidationInfo) -> list[Conversation] | None:
    """One conversation, or an array of them, as an array.

    The content of a message is one text, or where it has images its parts, as chat templates have them: texts, and
    images with their URL.

    Raises:
        InvalidPromptError: It has another form, or holds something that is neither text nor an image.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise InvalidPromptError(f"messages is {kind_of(value)}; give an array of messages", param="messages")
    if not value:
        raise InvalidPromptError("messages is empty", param="messages")
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
    return {**message, "content": read_content(message.get("content"), f"{where}.content", "messages")}


def read_content(content: Any, where: str, field: str) -> str | list[dict[str, str]]:
    """A message's content: one text, or its parts where there are images among them.

    Args:
        content: As the body has it.
        where: What it is, for messages.
        field: Of the body.

    Raises:
        InvalidPromptError: It is neither a text nor parts that are text or images.
    """
    if isinstance(content, list):
        parts = [_part(part, f"{where}[{place}]", field) for place, part in enumerate(content)]
        has_images = any(part["type"] == "image" for part in parts)
        return parts if has_images else "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise InvalidPromptError(f"{where} is {kind_of(content)}; give a string or parts", param=field)
    return content


def _part(part: Any, where: str, field: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise InvalidPromptError(
                f"{where}.image_url is {url!s:.40}; give {{'url': 'data:image/png;base64,...'}}", param=field
            )
        return {"type": "image", "url": url}
    told = kind_of(part) if kind is None else kind
    raise InvalidPromptError(f"{where} is {told!s:.80}; only text and image_url are served here", param=field)


def image_urls(conversation: Conversation) -> list[str]:
    """The URLs of a conversation's images, in their order."""
    contents = (message["content"] for message in conversation)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["url"] for part in parts if part["type"] == "image"]


def check_images(images: int, field: str, context: Any) -> None:
    """Refuses more images than the server takes inputs, however they are spread over inputs."""
    most = (context or {}).get("max_inputs")
    if most is not None and images > most:
        raise InvalidPromptError(
            f"{field} has {images:,} images, the limit is {most:,}: send several requests", param=field
        )


def least_size(images: int) -> int:
    """About as many characters of text as take as long to prepare as so many images."""
    return _IMAGE_SIZE * images


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
        check_images(self._images, "messages", context)

    @property
    def _images(self) -> int:
        return sum(len(image_urls(one)) for one in self.messages or ())

    @property
    def least_size(self) -> int:
        return least_size(self._images)

    @property
    def gets_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

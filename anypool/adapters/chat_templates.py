"""Conversations -> text, through a Jinja chat template: the checkpoint's own, or one that a request brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anypool.adapters.rerank_templates import read_template, template_environment, template_error
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.model_executor.weights.repository import Repository

# A message, as chat APIs have it: its role, its content as one text, and whatever else it has.
Message = Mapping[str, Any]


class ConversationTemplate:
    """A chat template over conversations, run in a sandbox.

    Args:
        text: The Jinja template.
        variables: What it sees beside the messages, such as the tokenizer's `bos_token`.

    Raises:
        InvalidParameterError: It is not a Jinja template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        self.text, self._variables = text, variables
        try:
            self._template = template_environment().from_string(text)
        except template_error() as error:
            raise InvalidParameterError(
                f"chat_template is not a valid Jinja template: {error}", param="chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: In their order.
            add_generation_prompt: Whether the beginning of an answer stands at the end.
            continue_final_message: Whether the text ends with the last message's content, and nothing closes it.
            variables: Further variables that the template sees.

        Raises:
            InvalidPromptError: The template refuses the conversation, or loses its last message.
        """
        known = {"tools": None, "documents": None, **self._variables, **(variables or {})}
        try:
            text = str(
                self._template.render(**{**known, "messages": messages, "add_generation_prompt": add_generation_prompt})
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidPromptError(f"the chat template cannot render messages: {error}", param="messages") from error
        return _up_to_the_last_content(text, messages) if continue_final_message else text


def _up_to_the_last_content(text: str, messages: Sequence[Message]) -> str:
    content = str(messages[-1].get("content") or "").strip()
    before, found, _ = text.rpartition(content)
    if not content or not found:
        raise InvalidPromptError(
            "continue_final_message: the chat template does not write the last message as it is", param="messages"
        )
    return before + found


def conversation_template(
    repository: Repository, variables: Mapping[str, Any], text: str | None = None
) -> ConversationTemplate | None:
    """A chat template for a checkpoint's conversations; None where it has none.

    Args:
        repository: The folder with the tokenizer's files.
        variables: As for `ConversationTemplate`.
        text: A template in place of the checkpoint's own.
    """
    source = text if text is not None else read_template(repository)
    return None if source is None else ConversationTemplate(source, variables)

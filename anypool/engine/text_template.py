"""Texts that a checkpoint reads in its chat template, each as the one message of a conversation.

sentence-transformers does so, from version 5.4, with every model whose processor has a template where it is saved: a
prompt of the checkpoint's or of the caller's is the system message.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from anypool.adapters.chat_templates import ConversationTemplate, conversation_template
from anypool.adapters.load import LoadedModel
from anypool.engine.image_prompts import ImagePrompts
from anypool.engine.prompts import ImagePrompt, TextPair, check_prompt
from anypool.engine.spans import SpannedPrompt
from anypool.engine.tokenization import Tokenizer
from anypool.errors import CheckpointFormatError, InvalidPromptError

# Two texts that have no ending in common.
_FILLERS = ("0", "1 2 3 4")


class TextTemplate:
    """The template of one checkpoint.

    Args:
        template: Its chat template.
        tokenizer: Its tokenizer.
        in_parts: Whether the content of a message is a list of parts rather than a text.
        add_generation_prompt: Whether the beginning of an answer stands at the end.
        variables: Further variables that the template sees.
        name: Of the model, for messages.
    """

    def __init__(
        self,
        template: ConversationTemplate,
        tokenizer: Tokenizer,
        *,
        in_parts: bool,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        name: str,
    ) -> None:
        self._template, self._tokenizer, self._in_parts, self._name = template, tokenizer, in_parts, name
        self._add_generation_prompt, self._variables = add_generation_prompt, variables
        self.ending = lru_cache(maxsize=256)(self._ending)

    @classmethod
    def of(cls, loaded: LoadedModel, tokenizer: Tokenizer | None) -> TextTemplate | None:
        """The template that a checkpoint puts its texts into; None where it reads them as they are.

        Raises:
            CheckpointFormatError: It says that it does, and there is no template.
        """
        recipe = loaded.recipe
        if recipe.message_format is None or recipe.is_cross_encoder or tokenizer is None:
            return None
        template = conversation_template(loaded.repository.subfolder(recipe.backbone), tokenizer.named_tokens)
        if template is None:
            raise CheckpointFormatError(f"{loaded.config.name} puts texts into a chat template, and there is none")
        variables = dict(recipe.template_variables)
        return cls(
            template,
            tokenizer,
            in_parts=recipe.message_format == "structured",
            add_generation_prompt=bool(variables.pop("add_generation_prompt", False)),
            variables=variables,
            name=loaded.config.name,
        )

    def render(self, text: str | None, prompt: str = "", *, images: int = 0) -> str:
        """What is read in place of a text.

        Args:
            text: The text; None where there are images alone.
            prompt: What would stand before it without a template.
            images: How many images stand before it.
        """
        system = [] if prompt == "" else [{"role": "system", "content": self._content(prompt)}]
        parts: list[dict[str, str]] = [{"type": "image"}] * images
        content = self._content(text or "") if not images else parts + ([self._part(text)] if text else [])
        return self._template.render(
            [*system, {"role": "user", "content": content}],
            add_generation_prompt=self._add_generation_prompt,
            variables=self._variables,
        )

    def apply(self, prompt: Any, index: int, prefix: str, images: ImagePrompts) -> Any:
        """A prompt as the template writes it; token ids and images with placeholders as they are.

        Args:
            prompt: In any of its forms.
            index: Its place among the inputs, for messages.
            prefix: What would stand before it without a template.
            images: What knows the placeholders of images.

        Raises:
            InvalidPromptError: It is a pair of texts or a text with spans, which do not go through the template.
        """
        prompt = check_prompt(prompt, index) if not isinstance(prompt, SpannedPrompt) else prompt
        if isinstance(prompt, str):
            return self.render(prompt, prefix)
        if isinstance(prompt, ImagePrompt):
            if images.has_placeholder(prompt.text or ""):
                return prompt
            return replace(prompt, text=self.render(prompt.text, images=len(prompt.images)))
        if isinstance(prompt, (TextPair, SpannedPrompt)):
            raise InvalidPromptError(
                f"input {index} is {'a pair of texts' if isinstance(prompt, TextPair) else 'a text with spans'}, and "
                f"{self._name} reads each text in its chat template"
            )
        return prompt

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [self._part(text)] if self._in_parts else text

    @staticmethod
    def _part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    def _ending(self, prompt: str) -> list[int]:
        """The tokens behind a text, which are kept where it is cut."""
        first, second = self._tokenizer.encode([self.render(one, prompt) for one in _FILLERS], special_tokens=False)
        count = next((i for i, (a, b) in enumerate(zip(first[::-1], second[::-1], strict=False)) if a != b), 0)
        return first[len(first) - count :]

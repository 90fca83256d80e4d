"""How a caller wants prompts to become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anypool.config import LoRARequest
from anypool.engine.prompts import ImagePrompt
from anypool.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts become token ids.

    Attributes:
        prompt_name: Which of the checkpoint's prompts is put before each text; None for its default one.
        prompt: Text put before each text, in place of a named prompt.
        truncate_prompt_tokens: Longest prompt after truncation; -1 for the model's limit, None for no truncation.
        truncation_side: "right" or "left": which end is cut; None for the tokenizer's own.
        special_tokens: Whether texts get the tokenizer's special tokens; False for texts that hold them already, such
            as rendered chats. Pairs always get theirs.
        is_rendered: Whether texts have been through a chat template already.
        lora_request: The LoRA adapter that prompts are run with, or the name of one that is known; one for all of them
            or one per prompt, None for the model as it is.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    special_tokens: bool = True
    is_rendered: bool = False
    lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None = None

    def or_prompt(self, name: str | None) -> PromptOptions:
        """These, with the checkpoint's prompt of a name where the caller asks for none."""
        if name is None or self.prompt is not None or self.prompt_name is not None:
            return self
        return replace(self, prompt_name=name)

    def refuse_prompt_before_ids(self, prompts: Sequence[object]) -> None:
        """Refuses a prompt where there is no text that it could be put before.

        Raises:
            InvalidParameterError: One of these prompts, which have been checked, is token ids or images.
        """
        if (self.prompt_name is not None or self.prompt) and any(isinstance(prompt, list) for prompt in prompts):
            raise InvalidParameterError(
                "a prompt is put before text and not before token ids: give texts, or ids that hold the prompt",
                param="prompt_name",
            )
        if self.prompt and any(isinstance(prompt, ImagePrompt) for prompt in prompts):
            raise InvalidParameterError(
                "a prompt is put before text and not before images: put it into the text that stands with them",
                param="prompt",
            )

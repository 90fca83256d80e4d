"""Texts -> token ids, with the checkpoint's or the caller's prompt before them."""

from __future__ import annotations

from collections.abc import Sequence

from anypool.adapters.recipe import Recipe
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.engine.fitting import Fitting
from anypool.engine.image_prompts import ImagePrompts
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import TextPair, check_text
from anypool.engine.tokenization import kept_positions
from anypool.errors import InvalidParameterError


class PromptEncoding:
    """Tokenises for one loaded model.

    Args:
        recipe: Its recipe, which has its prompts.
        fitting: What fits token ids to it, and has its tokenizer.
        images: Its image prompts, whose processor tokenises texts in some models.
    """

    def __init__(self, recipe: Recipe, fitting: Fitting, images: ImagePrompts) -> None:
        self._recipe, self._fitting, self._images = recipe, fitting, images
        self._tokenizer = fitting.tokenizer

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids of texts that have their prompts before them."""
        if texts and self._images.owns_texts:
            return self._images.texts(texts)
        return self._fitting.need_tokenizer().encode(texts, special_tokens=special_tokens) if texts else []

    def prefix(self, options: PromptOptions) -> tuple[str, int]:
        """The text put before each input, and how many tokens of it are not pooled.

        The text is the one given, the named one, or the checkpoint's default one.

        Raises:
            InvalidParameterError: The name is unknown, or both a text and a name are given.
        """
        recipe, tokenizer = self._recipe, self._tokenizer
        for field, value in (("prompt", options.prompt), ("prompt_name", options.prompt_name)):
            if value is not None and not isinstance(value, str):
                raise InvalidParameterError(f"{field}={value!r} is not a text", param=field)
        if options.prompt is not None and options.prompt_name is not None:
            raise InvalidParameterError("prompt and prompt_name are two ways to say the same: give one", param="prompt")
        name = self._name(options)
        if options.prompt is not None:
            prefix = check_text(options.prompt, "prompt")
        elif name is None:
            prefix = ""
        elif name in recipe.prompts:
            prefix = recipe.prompts[name]
        else:
            known = ", ".join(map(repr, recipe.prompts)) or "none"
            raise InvalidParameterError(
                f"prompt_name={name!r} is unknown; this model has: {known}", param="prompt_name"
            )
        if prefix == "" or recipe.include_prompt or tokenizer is None:
            return prefix, 0
        if recipe.skip_rule == "bare prompt":
            return prefix, len(tokenizer.encode([prefix], special_tokens=False)[0])
        added = 0 if options.special_tokens else len(tokenizer.prefix_ids)
        return prefix, tokenizer.prompt_length(prefix) - added

    def task(self, options: PromptOptions) -> str | None:
        """The checkpoint's own adapter that comes with the prompt; None for the weights as they are."""
        name = self._name(options) if options.prompt is None else None
        return None if not isinstance(name, str) else self._recipe.tasks.get(name)

    def _name(self, options: PromptOptions) -> str | None:
        return options.prompt_name if options.prompt_name is not None else self._recipe.default_prompt_name

    def skips(self, prompts: Sequence[object], encoded: Sequence[list[int]], skip: int) -> list[int]:
        """How many leading tokens of each text are not pooled: the prompt's, or all but as many as it has alone."""
        if self._recipe.skip_rule != "all but text" or self._tokenizer is None:
            return [skip] * len(encoded)
        alone = self.encode([prompt for prompt in prompts if isinstance(prompt, str)], special_tokens=False)
        return [max(0, len(ids) - len(text)) for ids, text in zip(encoded, alone, strict=True)]

    def pieces(self, prompts: Sequence[object], prefix: str) -> dict[str, list[int]]:
        """Ids of every text in pairs and templated prompts, each tokenised once: most come back in every prompt."""
        found: dict[str, None] = {}
        for prompt in prompts:
            if isinstance(prompt, TextPair):
                found |= dict.fromkeys((prefix + prompt.first, prompt.second))
            elif isinstance(prompt, TemplatedPrompt):
                found |= dict.fromkeys(prompt.pieces)
        if not found:
            return {}
        texts = list(found)
        return dict(zip(texts, self._fitting.need_tokenizer().encode(texts, special_tokens=False), strict=True))

    def side(self, options: PromptOptions) -> str:
        """The end at which texts are cut."""
        side = options.truncation_side
        if side not in (None, "left", "right"):
            raise InvalidParameterError(
                f"truncation_side={side!r} is neither 'left' nor 'right'", param="truncation_side"
            )
        return side or (self._tokenizer.truncation_side if self._tokenizer is not None else "right")

    def offsets(self, text: str, prefix: str, kept: int, truncated: int, side: str) -> list[tuple[int, int]]:
        """Where the tokens stand in a text, in characters.

        Args:
            text: Without its prompt.
            prefix: The prompt.
            kept: How many tokens remained of both.
            truncated: How many were cut off.
            side: At which end.
        """
        tokenizer = self._fitting.need_tokenizer()
        places = tokenizer.offsets(prefix + text)
        if truncated:
            [ids] = tokenizer.encode([prefix + text])
            positions = kept_positions(ids, kept, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)
            places = [places[i] for i in positions]
        return [(max(0, start - len(prefix)), max(0, end - len(prefix))) for start, end in places]

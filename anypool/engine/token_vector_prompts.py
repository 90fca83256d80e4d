"""Queries and documents of a multi-vector model, each read in its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anypool.adapters.multi_vector import MultiVector
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.engine.assembly import Assembly
from anypool.engine.fitting import Fitting
from anypool.engine.prompt_encoding import PromptEncoding
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import ImagePrompt, TextPair, check_prompt
from anypool.engine.request import Request
from anypool.errors import InvalidPromptError, UnsupportedTaskError
from anypool.pooling.plan import PoolingPlan


class TokenVectorPrompts:
    """Makes requests for token vectors: a marker, a length and an expansion of queries or of documents.

    Args:
        multi_vector: How the checkpoint reads either.
        name: Of the model, for messages.
        encoding, fitting, assembly: The steps from a text to a request.
    """

    def __init__(
        self, multi_vector: MultiVector, name: str, encoding: PromptEncoding, fitting: Fitting, assembly: Assembly
    ) -> None:
        self._multi_vector, self._name = multi_vector, name
        self._encoding, self._fitting, self._assembly = encoding, fitting, assembly

    def requests(
        self, prompts: Sequence[Any], plans: Sequence[tuple[PoolingPlan, ...]], options: PromptOptions
    ) -> list[Request]:
        """Requests for prompts whose plans say which side each is."""
        if any(len(several) > 1 for several in plans):
            raise UnsupportedTaskError(
                f"{self._name} reads texts for token_embed otherwise than for its other tasks: ask for it alone",
                param="task",
            )
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        options.refuse_prompt_before_ids(checked)
        asked, end = options.truncate_prompt_tokens, self._encoding.side(options)
        if asked is None:
            self._fitting.refuse_endless(checked)
        sides = [self._multi_vector.side(is_query=plan.is_query) for (plan,) in plans]
        prefixes = {
            side: self._encoding.prefix(options.or_prompt(side.prompt_name))[0] for side in dict.fromkeys(sides)
        }
        texts = [prefixes[side] + one for side, one in zip(sides, checked, strict=True) if isinstance(one, str)]
        encoded = iter(self._encoding.encode(texts, special_tokens=options.special_tokens))
        requests = []
        for index, (prompt, side, (plan,)) in enumerate(zip(checked, sides, plans, strict=True)):
            own = self._text_or_ids(prompt, index)
            ids = next(encoded) if isinstance(own, str) else own
            tokens = self._fitting.one_side(side, ids, index, asked, side=end)
            self._assembly.check(tokens, index, plan)
            if not side.kept.keeps_any(tokens.ids):
                raise InvalidPromptError(
                    f"input {index} has no vectors: all of its {len(tokens.ids)} tokens are ones that "
                    f"{self._name} leaves out, such as punctuation"
                )
            requests.append(self._assembly.request(tokens, plan, index))
        return requests

    def _text_or_ids(
        self, prompt: str | list[int] | TextPair | TemplatedPrompt | ImagePrompt, index: int
    ) -> str | list[int]:
        if isinstance(prompt, ImagePrompt):
            raise InvalidPromptError(f"input {index} has an image, and {self._name} reads text alone")
        if isinstance(prompt, (TextPair, TemplatedPrompt)):
            raise InvalidPromptError(f"input {index} is a pair of texts, and {self._name} reads each text by itself")
        return prompt

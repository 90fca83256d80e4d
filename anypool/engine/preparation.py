"""Prompts -> requests: checked, planned, tokenised and fitted to the model, all of them before any is queued."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anypool.adapters.load import LoadedModel
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.engine.prompts import Prompt, TextPair, check_prompt, check_text
from anypool.engine.request import Request
from anypool.engine.tokenization import Tokenizer, kept_positions, truncate
from anypool.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError
from anypool.pooling.params import PoolingParams
from anypool.pooling.plan import PoolingPlan, make_plan
from anypool.pooling.tasks import PoolingTask

# More characters than a text can have per token, on average, and still be a text.
_CHARACTERS_PER_TOKEN = 250


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts become token ids.

    Attributes:
        prompt_name: Which of the checkpoint's prompts is put before each text; None for its default one.
        prompt: Text put before each text, in place of a named prompt.
        truncate_prompt_tokens: Longest prompt after truncation; -1 for the model's limit, None for no truncation.
        truncation_side: "right" or "left": which end is cut; None for the tokenizer's own.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


@dataclass(frozen=True)
class _Tokens:
    """A prompt's ids after truncation."""

    ids: list[int]
    truncated: int = 0
    types: list[int] | None = None
    skip: int = 0


def _texts_of(prompt: object) -> tuple[str, ...]:
    if isinstance(prompt, TextPair):
        return prompt.first, prompt.second
    if isinstance(prompt, TemplatedPrompt):
        return prompt.pieces
    return (prompt,) if isinstance(prompt, str) else ()


class Preparation:
    """Makes requests for one loaded model.

    Args:
        loaded: The model.
        tokenizer: Its tokenizer; None where prompts are token ids only.
        max_model_len: Longest prompt in tokens.
    """

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._ids = itertools.count()

    def prepare(
        self,
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None,
        options: PromptOptions,
    ) -> list[Request]:
        """Turns prompts into requests; see `Engine.prepare`."""
        plans = self._plans(len(prompts), task, params)
        limit = self._truncation_limit(options)
        side = self._side(options)
        prefix, skip = self._prompt_prefix(options)
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        if limit is None:
            self._refuse_endless(checked)
        if (options.prompt_name is not None or options.prompt) and any(isinstance(p, list) for p in checked):
            raise InvalidParameterError(
                "a prompt is put before text and not before token ids: give texts, or ids that hold the prompt",
                param="prompt_name",
            )
        texts = iter(self._encode([prefix + prompt for prompt in checked if isinstance(prompt, str)]))
        pieces = self._pieces(checked, prefix)
        requests = []
        for index, (prompt, plan) in enumerate(zip(checked, plans, strict=True)):
            if isinstance(prompt, TextPair):
                first, second = pieces[prefix + prompt.first], pieces[prompt.second]
                tokens = self._pair(first, second, index, limit, side, skip)
            elif isinstance(prompt, TemplatedPrompt):
                tokens = self._templated(prompt, pieces, index, limit, options.truncation_side or "right")
            else:
                is_text = isinstance(prompt, str)
                ids = next(texts) if isinstance(prompt, str) else prompt
                kept = self._fit(ids, index, limit, side)
                tokens = _Tokens(kept, len(ids) - len(kept), skip=skip if is_text else 0)
            self._check_ids(tokens, index, plan)
            requests.append(
                Request(
                    request_id=str(next(self._ids)),
                    token_ids=tokens.ids,
                    plan=plan,
                    token_type_ids=tokens.types,
                    skip=tokens.skip,
                    num_truncated_tokens=tokens.truncated,
                )
            )
        return requests

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Start and end in characters of each of a request's tokens in its text, without the prompt before it."""
        text = check_prompt(prompt, 0)
        if not isinstance(text, str) or self.tokenizer is None:
            return None
        prefix, _ = self._prompt_prefix(options)
        places = self.tokenizer.offsets(prefix + text)
        if request.num_truncated_tokens:
            [ids] = self.tokenizer.encode([prefix + text])
            kept = kept_positions(
                ids,
                len(request),
                side=self._side(options),
                prefix=self.tokenizer.prefix_ids,
                suffix=self.tokenizer.suffix_ids,
            )
            places = [places[i] for i in kept]
        return [(max(0, start - len(prefix)), max(0, end - len(prefix))) for start, end in places]

    def prompt_text(self, options: PromptOptions) -> str:
        """The text that is put before each input: the one given, the named one, or the checkpoint's default one."""
        return self._prompt_prefix(options)[0]

    def _plans(
        self, count: int, task: PoolingTask, params: PoolingParams | Sequence[PoolingParams] | None
    ) -> list[PoolingPlan]:
        if params is None or isinstance(params, PoolingParams):
            return [make_plan(task, params or PoolingParams(), self.loaded.defaults)] * count
        if not isinstance(params, (list, tuple)):
            raise InvalidParameterError(f"pooling_params={params!r} is not a PoolingParams, nor a list of them")
        if len(params) != count:
            raise InvalidParameterError(f"{len(params)} pooling_params were given for {count} prompts")
        for one in params:
            if not isinstance(one, PoolingParams):
                raise InvalidParameterError(f"pooling_params has {one!r}, which is not a PoolingParams")
        return [make_plan(task, one, self.loaded.defaults) for one in params]

    def _truncation_limit(self, options: PromptOptions) -> int | None:
        asked = options.truncate_prompt_tokens
        if asked is None:
            return None
        if not isinstance(asked, int) or isinstance(asked, bool) or asked == 0 or asked < -1:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={asked!r} is neither a positive number nor -1 (the model's limit)",
                param="truncate_prompt_tokens",
            )
        if asked > self.max_model_len:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={asked} is more than the model takes, {self.max_model_len}",
                param="truncate_prompt_tokens",
            )
        return self.max_model_len if asked == -1 else asked

    def _side(self, options: PromptOptions) -> str:
        side = options.truncation_side
        if side not in (None, "left", "right"):
            raise InvalidParameterError(
                f"truncation_side={side!r} is neither 'left' nor 'right'", param="truncation_side"
            )
        return side or (self.tokenizer.truncation_side if self.tokenizer is not None else "right")

    def _prompt_prefix(self, options: PromptOptions) -> tuple[str, int]:
        """The text put before each input, and how many tokens of it are not pooled."""
        recipe = self.loaded.recipe
        for field, value in (("prompt", options.prompt), ("prompt_name", options.prompt_name)):
            if value is not None and not isinstance(value, str):
                raise InvalidParameterError(f"{field}={value!r} is not a text", param=field)
        if options.prompt is not None and options.prompt_name is not None:
            raise InvalidParameterError("prompt and prompt_name are two ways to say the same: give one", param="prompt")
        name = options.prompt_name if options.prompt_name is not None else recipe.default_prompt_name
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
        if prefix == "" or recipe.include_prompt or self.tokenizer is None:
            return prefix, 0
        return prefix, self.tokenizer.prompt_length(prefix)

    def _refuse_endless(self, prompts: Sequence[object]) -> None:
        """Refuses a text that no vocabulary could bring down to the limit, before minutes go into tokenising it."""
        most = _CHARACTERS_PER_TOKEN * self.max_model_len
        for index, prompt in enumerate(prompts):
            characters = sum(map(len, _texts_of(prompt)))
            if characters > most:
                raise PromptTooLongError(
                    f"input {index} has {characters:,} characters, and the limit is {self.max_model_len:,} tokens: "
                    "pass truncate_prompt_tokens=-1, or split the text"
                )

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._need_tokenizer().encode(texts) if texts else []

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidPromptError(
                f"{self.loaded.config.name} was loaded without a tokenizer: give token ids, or pass tokenizer="
            )
        return self.tokenizer

    def _fit(self, ids: list[int], index: int, limit: int | None, side: str) -> list[int]:
        if limit is None:
            if len(ids) > self.max_model_len:
                raise self._too_long(index, len(ids))
            return ids
        if self.tokenizer is None:
            return truncate(ids, limit, side=side)
        return truncate(ids, limit, side=side, prefix=self.tokenizer.prefix_ids, suffix=self.tokenizer.suffix_ids)

    def _pieces(self, prompts: Sequence[object], prefix: str) -> dict[str, list[int]]:
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
        return dict(zip(texts, self._need_tokenizer().encode(texts, special_tokens=False), strict=True))

    def _pair(
        self, first: list[int], second: list[int], index: int, limit: int | None, side: str, skip: int
    ) -> _Tokens:
        """Two texts with the tokenizer's own pair template; the longer of them is cut first."""
        tokenizer = self._need_tokenizer()
        if self.loaded.rerank_template is not None:
            raise InvalidPromptError(
                f"input {index} is a pair of texts, and {self.loaded.config.name} reads it in a template: call score()"
            )
        ids, types, full = tokenizer.join_pair(first, second, limit, side=side)
        if limit is None and full > self.max_model_len:
            raise self._too_long(index, full)
        has_types = tokenizer.has_segments and self.loaded.config.type_vocab_size > 1
        return _Tokens(ids, full - len(ids), types=types if has_types else None, skip=skip)

    def _templated(
        self, prompt: TemplatedPrompt, pieces: Mapping[str, list[int]], index: int, limit: int | None, side: str
    ) -> _Tokens:
        """Pieces tokenised one by one; where they are too long, the document is cut and nothing else."""
        parts = [pieces[piece] for piece in prompt.pieces]
        around = self._special_tokens_around(parts[0], parts[-1]) if prompt.special_tokens else ([], [])
        full = sum(map(len, (*around, *parts)))
        if full > (self.max_model_len if limit is None else limit):
            if limit is None:
                raise self._too_long(index, full)
            cut = parts[prompt.cut]
            parts[prompt.cut] = self._cut_document(prompt, cut, full - len(cut), index, limit, side)
        ids = [i for part in (around[0], *parts, around[1]) for i in part]
        return _Tokens(ids, full - len(ids))

    def _special_tokens_around(self, first: list[int], last: list[int]) -> tuple[list[int], list[int]]:
        """The tokenizer's special tokens before and after a prompt, unless it begins or ends with them already."""
        before, after = self._need_tokenizer().prefix_ids, self._need_tokenizer().suffix_ids
        has_before = first[: len(before)] == before
        has_after = last[len(last) - len(after) :] == after
        return [] if has_before else before, [] if has_after else after

    def _cut_document(
        self, prompt: TemplatedPrompt, whole: list[int], others: int, index: int, limit: int, side: str
    ) -> list[int]:
        """The part that holds the document, so short that it fits into the limit with `others` tokens beside it."""
        before, after = self._need_tokenizer().around(prompt.pieces[prompt.cut], *prompt.document)
        room = limit - others - len(after)
        if room < before:
            raise InvalidPromptError(
                f"input {index}: the template and the query alone have {others + before + len(after):,} tokens, "
                f"the limit is {limit:,}: shorten the query",
                param="truncate_prompt_tokens",
            )
        if side == "left":
            before = self._need_tokenizer().tokens_before(prompt.pieces[prompt.cut], prompt.document[0])
            return whole[:before] + whole[len(whole) - (limit - others - before) :]
        return whole[:room] + after

    def _too_long(self, index: int, tokens: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"input {index} has {tokens:,} tokens, the limit is {self.max_model_len:,}: "
            "pass truncate_prompt_tokens=-1, or split the text"
        )

    def _check_ids(self, tokens: _Tokens, index: int, plan: PoolingPlan) -> None:
        ids = tokens.ids
        if not ids:
            raise InvalidPromptError(
                f"input {index} has no tokens: it is empty, and this model's tokenizer adds no special tokens"
            )
        vocab = self.loaded.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise InvalidPromptError(f"input {index} has the token id {wrong}; this model's ids are 0 to {vocab - 1}")
        if tokens.skip >= len(ids):
            raise InvalidPromptError(
                f"input {index} has no tokens left to pool: all {len(ids)} belong to the prompt, "
                "which this model leaves out of pooling"
            )
        if plan.step_tag_id is not None and plan.step_tag_id not in ids:
            raise InvalidPromptError(
                f"input {index} has no step tag: the token {plan.step_tag_id} must stand after each step",
                param="step_tag_id",
            )

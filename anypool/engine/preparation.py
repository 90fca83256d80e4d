"""Prompts -> requests: checked, planned, tokenised and fitted to the model, all of them before any is queued."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anypool.adapters.load import LoadedModel
from anypool.adapters.multi_vector import MultiVector, Side
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import LoRARequest, require
from anypool.engine.fitting import Fitted, Fitting
from anypool.engine.image_prompts import ImagePrompts
from anypool.engine.lookup import Lookup
from anypool.engine.lora import LoRAManager, assign, find_adapters
from anypool.engine.prompts import ImagePrompt, Prompt, TextPair, check_prompt, check_text
from anypool.engine.request import Request
from anypool.engine.spans import SpannedPrompt, token_spans
from anypool.engine.text_template import TextTemplate
from anypool.engine.tokenization import Tokenizer, kept_positions
from anypool.engine.windows import combination
from anypool.errors import (
    InvalidParameterError,
    InvalidPromptError,
    PromptTooLongError,
    UnsupportedTaskError,
)
from anypool.model_executor.images import ImageInputs
from anypool.pooling.methods import PoolingType
from anypool.pooling.params import PoolingParams
from anypool.pooling.plan import PoolingPlan, make_plans
from anypool.pooling.pooler import EmbedPooler
from anypool.pooling.tasks import PoolingTask

# What cannot be made of a text's windows.
_WHOLE = {PoolingTask.REWARD: "reward", PoolingTask.SPARSE_EMBED: "sparse vector of this model"}


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


class Preparation:
    """Makes requests for one loaded model.

    Args:
        loaded: The model.
        tokenizer: Its tokenizer; None where prompts are token ids only.
        max_model_len: Longest prompt in tokens that is run as one.
        lora: The adapters that prompts may be run with; None where there are none.

    Raises:
        ConfigError: What the user says about windows contradicts the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        lora: LoRAManager | None = None,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self._lora = lora
        self._fitting = Fitting(loaded, tokenizer, max_model_len)
        self._images = ImagePrompts(loaded, max_model_len)
        self._template = TextTemplate.of(loaded, tokenizer)
        require(
            self._template is None or not self._fitting.in_windows,
            f"PoolerConfig: enable_chunked_processing is not supported for {loaded.config.name}, which reads each text "
            "in its chat template",
        )
        self._ids = itertools.count()
        router = loaded.recipe.router
        if router is not None and router.table is not None and loaded.defaults.sparse is not None:
            self._lookup = Lookup(loaded, tokenizer)

    def prepare(
        self,
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt | ImagePrompt | SpannedPrompt],
        task: PoolingTask | Sequence[PoolingTask],
        params: PoolingParams | Sequence[PoolingParams] | None,
        options: PromptOptions,
    ) -> list[Request]:
        """Turns prompts into requests; see `Engine.prepare`."""
        if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__len__"):
            raise InvalidPromptError(f"prompts={prompts!r:.80} is not a list of prompts")
        tasks = (task,) if isinstance(task, PoolingTask) else tuple(task)
        plans = self._plans(len(prompts), tasks, params)
        adapters = find_adapters(self._lora, options.lora_request, len(prompts))
        requests = self._prepare(prompts, tasks, plans, options)
        if any(adapters):
            assign(requests, adapters)
        return requests

    def _prepare(
        self,
        prompts: Sequence[Any],
        tasks: Sequence[PoolingTask],
        plans: Sequence[tuple[PoolingPlan, ...]],
        options: PromptOptions,
    ) -> list[Request]:
        if PoolingTask.SPARSE_EMBED in tasks or self.loaded.defaults.sides is not None:
            return self._by_side(prompts, plans, options)
        if PoolingTask.TOKEN_EMBED in tasks and self.loaded.multi_vector is not None:
            return self._token_vectors(prompts, plans, options, self.loaded.multi_vector)
        return self._requests(prompts, plans, options)

    def _by_side(
        self, prompts: Sequence[Any], plans: Sequence[tuple[PoolingPlan, ...]], options: PromptOptions
    ) -> list[Request]:
        """Requests where sides count: texts of each get its prompt, and those of some are only looked up."""
        sides = [
            next((plan for plan in several if plan.is_looked_up or plan.side is not None), several[0])
            for several in plans
        ]
        made: dict[int, Request] = {}
        for side in dict.fromkeys(plan.side for plan in sides):
            places = [index for index, plan in enumerate(sides) if plan.side == side]
            chosen, asked = self._with_prompt_of(side, options), [prompts[index] for index in places]
            if sides[places[0]].is_looked_up:
                if len(plans[0]) > 1:
                    raise UnsupportedTaskError(
                        f"{self.loaded.config.name} looks these texts up and does not run them: ask for sparse_embed "
                        "alone",
                        param="task",
                    )
                requests = self._looked_up(asked, [sides[index] for index in places], chosen)
            else:
                requests = self._requests(asked, [plans[index] for index in places], chosen)
            made |= dict(zip(places, requests, strict=True))
        return [made[index] for index in range(len(plans))]

    def _looked_up(self, prompts: Sequence[Any], plans: Sequence[PoolingPlan], options: PromptOptions) -> list[Request]:
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        _refuse_prompt_before_ids(options, checked)
        prefix, _ = self._prompt_prefix(options)
        texts: list[str | list[int]] = []
        for index, prompt in enumerate(checked):
            if not isinstance(prompt, (str, list)):
                raise InvalidPromptError(f"input {index} is a pair of texts, and these are read each by itself")
            texts.append(prefix + prompt if isinstance(prompt, str) else prompt)
        limit = options.truncate_prompt_tokens
        if limit is not None and limit != -1:
            self._fitting.limit(limit)  # checks it
        side = None if options.truncation_side is None else self._side(options)
        names = [str(next(self._ids)) for _ in texts]
        return self._lookup.requests(texts, plans, names, None if limit == -1 else limit, side=side)

    def _with_prompt_of(self, side: bool | None, options: PromptOptions) -> PromptOptions:
        """The options with the prompt that the checkpoint has for a side, where the caller names none."""
        if side is None or options.prompt is not None or options.prompt_name is not None:
            return options
        prompts = self.loaded.recipe.prompts
        names = ("query",) if side else ("document", "passage", "corpus")
        return replace(options, prompt_name=next((name for name in names if name in prompts), None))

    def _requests(
        self, prompts: Sequence[Any], plans: Sequence[tuple[PoolingPlan, ...]], options: PromptOptions
    ) -> list[Request]:
        """Requests for prompts that are run as they are, with one prompt before all of them."""
        limit = self._fitting.limit(options.truncate_prompt_tokens)
        side = self._side(options)
        prefix, skip = self._prompt_prefix(options)
        template = None if options.is_rendered else self._template
        if template is not None:
            prompts = [self._in_template(template, one, index, prefix) for index, one in enumerate(prompts)]
            ending, skip, prefix = template.ending(prefix), 0, ""
            options = replace(options, special_tokens=False)
        spans = [prompt if isinstance(prompt, SpannedPrompt) else None for prompt in prompts]
        checked = [check_prompt(p.prompt if isinstance(p, SpannedPrompt) else p, i) for i, p in enumerate(prompts)]
        if limit is None:
            self._fitting.refuse_endless(checked)
        _refuse_prompt_before_ids(options, checked)
        whole = [prefix + prompt for prompt in checked if isinstance(prompt, str)]
        encoded = self._encode(whole, special_tokens=options.special_tokens)
        texts = iter(zip(encoded, self._skips(checked, encoded, skip), strict=True))
        pieces = self._pieces(checked, prefix)
        requests = []
        for index, (prompt, (plan, *others)) in enumerate(zip(checked, plans, strict=True)):
            images = None
            if isinstance(prompt, ImagePrompt):
                ids, images = self._images.encode(prompt, index, special_tokens=options.special_tokens)
                tokens = Fitted(ids)
            elif isinstance(prompt, TextPair):
                first, second = pieces[prefix + prompt.first], pieces[prompt.second]
                tokens = self._fitting.pair(first, second, index, limit, side=side, skip=skip)
            elif isinstance(prompt, TemplatedPrompt):
                tokens = self._fitting.templated(prompt, pieces, index, limit, side=options.truncation_side or "right")
            else:
                before = prefix if isinstance(prompt, str) else ""
                ids, skipped = next(texts) if isinstance(prompt, str) else (prompt, 0)
                around = self._images.around if isinstance(prompt, str) else None
                if template is not None and isinstance(prompt, str):
                    around = [], ending
                tokens = self._fitting.single(ids, index, limit, side=side, prefix=before, skip=skipped, around=around)
            for one in (plan, *others):
                self._check_ids(tokens, index, one)
            if images is None:
                self._images.refuse_image_tokens(tokens.ids, index)
            spanned = spans[index]
            if spanned is not None:
                plan = replace(plan, spans=self._spans(spanned, index, tokens, prefix, side))
            best = isinstance(prompt, (TextPair, TemplatedPrompt))
            also = tuple(self._request(tokens, one, index, best=best, images=images) for one in others)
            requests.append(self._request(tokens, plan, index, best=best, images=images, also=also))
        return requests

    def _in_template(self, template: TextTemplate, prompt: Any, index: int, prefix: str) -> Any:
        """A prompt as the checkpoint's chat template writes it; token ids and images with placeholders as they are."""
        prompt = check_prompt(prompt, index) if not isinstance(prompt, SpannedPrompt) else prompt
        if isinstance(prompt, str):
            return template.render(prompt, prefix)
        if isinstance(prompt, ImagePrompt):
            if self._images.has_placeholder(prompt.text or ""):
                return prompt
            return replace(prompt, text=template.render(prompt.text, images=len(prompt.images)))
        if isinstance(prompt, (TextPair, SpannedPrompt)):
            raise InvalidPromptError(
                f"input {index} is {'a pair of texts' if isinstance(prompt, TextPair) else 'a text with spans'}, and "
                f"{self.loaded.config.name} reads each text in its chat template"
            )
        return prompt

    def _token_vectors(
        self,
        prompts: Sequence[Any],
        plans: Sequence[tuple[PoolingPlan, ...]],
        options: PromptOptions,
        multi_vector: MultiVector,
    ) -> list[Request]:
        """Requests for the token vectors of queries and documents, which are read each in their way."""
        if any(len(several) > 1 for several in plans):
            raise UnsupportedTaskError(
                f"{self.loaded.config.name} reads texts for token_embed otherwise than for its other tasks: ask for "
                "it alone",
                param="task",
            )
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        _refuse_prompt_before_ids(options, checked)
        asked, end = options.truncate_prompt_tokens, self._side(options)
        if asked is None:
            self._fitting.refuse_endless(checked)
        sides = [multi_vector.side(is_query=plan.is_query) for (plan,) in plans]
        prefixes = {which: self._prompt_prefix(_with_own_prompt(options, which))[0] for which in dict.fromkeys(sides)}
        texts = [prefixes[which] + one for which, one in zip(sides, checked, strict=True) if isinstance(one, str)]
        encoded = iter(self._encode(texts, special_tokens=options.special_tokens))
        requests = []
        for index, (prompt, which, (plan,)) in enumerate(zip(checked, sides, plans, strict=True)):
            if isinstance(prompt, ImagePrompt):
                raise InvalidPromptError(f"input {index} has an image, and {self.loaded.config.name} reads text alone")
            if isinstance(prompt, (TextPair, TemplatedPrompt)):
                raise InvalidPromptError(
                    f"input {index} is a pair of texts, and {self.loaded.config.name} reads each text by itself"
                )
            if isinstance(prompt, ImagePrompt):
                raise InvalidPromptError(f"input {index} has an image, and {self.loaded.config.name} reads text alone")
            ids = next(encoded) if isinstance(prompt, str) else prompt
            tokens = self._fitting.one_side(which, ids, index, asked, side=end)
            self._check_ids(tokens, index, plan)
            if not which.kept.keeps_any(tokens.ids):
                raise InvalidPromptError(
                    f"input {index} has no vectors: all of its {len(tokens.ids)} tokens are ones that "
                    f"{self.loaded.config.name} leaves out, such as punctuation"
                )
            requests.append(self._request(tokens, plan, index, best=False))
        return requests

    def _request(
        self,
        tokens: Fitted,
        plan: PoolingPlan,
        index: int,
        *,
        best: bool,
        images: ImageInputs | None = None,
        also: tuple[Request, ...] = (),
    ) -> Request:
        """A request for a prompt, or one whose parts are its windows; for scores the `best` of these counts.

        Others that it answers `also` are of the same prompt, so that their parts are the same windows.
        """
        name = str(next(self._ids))
        if not tokens.windows:
            return Request(
                request_id=name,
                token_ids=tokens.ids,
                plan=plan,
                token_type_ids=tokens.types,
                images=images,
                skip=tokens.skip,
                num_keys=tokens.num_keys,
                num_truncated_tokens=tokens.truncated,
                also=also,
            )
        combine = combination(plan, tokens.windows, tokens.ids, best=best, defaults=self.loaded.defaults)
        if combine is None:
            raise PromptTooLongError(
                f"input {index} has {len(tokens.ids):,} tokens, the limit is {self._fitting.max_model_len:,}: a "
                f"{_WHOLE[plan.task]} is about a whole text, so it is not run in windows; pass "
                "truncate_prompt_tokens=-1, or shorten it"
            )
        parts = tuple(
            Request(
                request_id=f"{name}.{number}",
                token_ids=window.token_ids,
                plan=part_plan,
                token_type_ids=window.token_type_ids,
                skip=tokens.skip,
                also=tuple(one.parts[number] for one in also),
            )
            for number, (window, part_plan) in enumerate(combine.parts)
        )
        return Request(
            request_id=name,
            token_ids=tokens.ids,
            plan=plan,
            num_truncated_tokens=tokens.truncated,
            parts=parts,
            combine=combine,
            also=also,
        )

    def _spans(
        self, prompt: SpannedPrompt, index: int, tokens: Fitted, prefix: str, side: str
    ) -> tuple[tuple[int, int], ...]:
        """The tokens of each span, for a model whose embedding is the mean of its tokens' states."""
        model: Any = self.loaded.model
        pooler = model.pooler[PoolingTask.EMBED]
        if not isinstance(pooler, EmbedPooler) or pooler.types != (PoolingType.MEAN,):
            pooling = "+".join(pooler.types) if isinstance(pooler, EmbedPooler) else "a pooler of its own"
            raise UnsupportedTaskError(
                f"a span's embedding is the mean of its tokens, and {self.loaded.config.name} pools by {pooling}: "
                "take a model that pools by MEAN, or pass pooler_config=PoolerConfig(pooling_type='MEAN')"
            )
        if not isinstance(prompt.prompt, str):
            return token_spans(prompt, index, len(tokens.ids), None)
        offsets = self._offsets(prompt.prompt, prefix, len(tokens.ids), tokens.truncated, side)
        return token_spans(prompt, index, len(tokens.ids), offsets)

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Start and end in characters of each of a request's tokens in its text, without the prompt before it."""
        text = check_prompt(prompt, 0)
        if not isinstance(text, str) or self.tokenizer is None or self._template is not None:
            return None
        prefix, _ = self._prompt_prefix(options)
        return self._offsets(text, prefix, len(request.token_ids), request.num_truncated_tokens, self._side(options))

    def _offsets(self, text: str, prefix: str, kept: int, truncated: int, side: str) -> list[tuple[int, int]]:
        """Where the tokens stand in a text of which `kept` remained when `truncated` were cut off."""
        tokenizer = self._fitting.need_tokenizer()
        places = tokenizer.offsets(prefix + text)
        if truncated:
            [ids] = tokenizer.encode([prefix + text])
            positions = kept_positions(ids, kept, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)
            places = [places[i] for i in positions]
        return [(max(0, start - len(prefix)), max(0, end - len(prefix))) for start, end in places]

    def prompt_text(self, options: PromptOptions) -> str:
        """The text that is put before each input: the one given, the named one, or the checkpoint's default one."""
        return self._prompt_prefix(options)[0]

    def _plans(
        self, count: int, tasks: Sequence[PoolingTask], params: PoolingParams | Sequence[PoolingParams] | None
    ) -> list[tuple[PoolingPlan, ...]]:
        """For each prompt a plan per task."""
        if params is None or isinstance(params, PoolingParams):
            return [make_plans(tasks, params or PoolingParams(), self.loaded.defaults)] * count
        if not isinstance(params, (list, tuple)):
            raise InvalidParameterError(f"pooling_params={params!r} is not a PoolingParams, nor a list of them")
        if len(params) != count:
            raise InvalidParameterError(f"{len(params)} pooling_params were given for {count} prompts")
        for one in params:
            if not isinstance(one, PoolingParams):
                raise InvalidParameterError(f"pooling_params has {one!r}, which is not a PoolingParams")
        return [make_plans(tasks, one, self.loaded.defaults) for one in params]

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
        if recipe.skip_rule == "bare prompt":
            return prefix, len(self.tokenizer.encode([prefix], special_tokens=False)[0])
        added = 0 if options.special_tokens else len(self.tokenizer.prefix_ids)
        return prefix, self.tokenizer.prompt_length(prefix) - added

    def _skips(self, prompts: Sequence[object], encoded: Sequence[list[int]], skip: int) -> list[int]:
        """How many leading tokens of each text are not pooled: the prompt's, or all but as many as it has alone."""
        if self.loaded.recipe.skip_rule != "all but text" or self.tokenizer is None:
            return [skip] * len(encoded)
        alone = self._encode([prompt for prompt in prompts if isinstance(prompt, str)], special_tokens=False)
        return [max(0, len(ids) - len(text)) for ids, text in zip(encoded, alone, strict=True)]

    def _encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        if texts and self._images.owns_texts:
            return self._images.texts(texts)
        return self._fitting.need_tokenizer().encode(texts, special_tokens=special_tokens) if texts else []

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
        return dict(zip(texts, self._fitting.need_tokenizer().encode(texts, special_tokens=False), strict=True))

    def _check_ids(self, tokens: Fitted, index: int, plan: PoolingPlan) -> None:
        ids = tokens.ids
        if not ids:
            raise InvalidPromptError(
                f"input {index} has no tokens: it is empty, and this model's tokenizer adds no special tokens"
            )
        vocab = self.loaded.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise InvalidPromptError(
                f"input {index} has the token id {wrong}; this model's ids are 0 to {vocab - 1}: "
                "it may be of another tokenizer, and texts are safer"
            )
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


def _refuse_prompt_before_ids(options: PromptOptions, prompts: Sequence[object]) -> None:
    if (options.prompt_name is not None or options.prompt) and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidParameterError(
            "a prompt is put before text and not before token ids: give texts, or ids that hold the prompt",
            param="prompt_name",
        )
    if options.prompt and any(isinstance(prompt, ImagePrompt) for prompt in prompts):
        raise InvalidParameterError(
            "a prompt is put before text and not before images: put it into the text that stands with them",
            param="prompt",
        )


def _with_own_prompt(options: PromptOptions, which: Side) -> PromptOptions:
    """The options with the prompt of a side, where the caller names none."""
    if which.prompt_name is None or options.prompt is not None or options.prompt_name is not None:
        return options
    return replace(options, prompt_name=which.prompt_name)

"""Prompts -> requests: checked, planned, tokenised and fitted to the model, all of them before any is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anypool.adapters.load import LoadedModel
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import require
from anypool.engine.assembly import Assembly
from anypool.engine.fitting import Fitted, Fitting
from anypool.engine.image_prompts import ImagePrompts
from anypool.engine.known_adapters import KnownAdapters, assign, find_adapters
from anypool.engine.lookup import Lookup
from anypool.engine.prompt_encoding import PromptEncoding
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import ImagePrompt, Prompt, TextPair, check_prompt
from anypool.engine.request import Request
from anypool.engine.spans import SpannedPrompt, refuse_unless_mean, token_spans
from anypool.engine.text_template import TextTemplate
from anypool.engine.token_vector_prompts import TokenVectorPrompts
from anypool.engine.tokenization import Tokenizer, kept_positions
from anypool.errors import InvalidParameterError, InvalidPromptError, UnsupportedTaskError
from anypool.model_executor.images import ImageInputs
from anypool.pooling.params import PoolingParams
from anypool.pooling.plan import PoolingPlan, make_plans
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the prompts of one call are read.

    Attributes:
        options: The caller's.
        limit: Where they are cut; None where one that is too long is refused.
        side: At which end.
        prefix: What is put before texts.
        skip: How many leading tokens, of this prefix, are not pooled.
        around: Ids before and after a text in its chat template, which are kept; None without one.
        pieces: Ids of the texts in pairs and templated prompts.
    """

    options: PromptOptions
    limit: int | None
    side: str
    prefix: str
    skip: int
    around: tuple[list[int], list[int]] | None
    pieces: Mapping[str, list[int]]


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
        lora: KnownAdapters | None = None,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self._lora = lora
        self._fitting = Fitting(loaded, tokenizer, max_model_len)
        self._images = ImagePrompts(loaded, max_model_len)
        self._encoding = PromptEncoding(loaded.recipe, self._fitting, self._images)
        self._assembly = Assembly(loaded, max_model_len)
        self._template = TextTemplate.of(loaded, tokenizer)
        require(
            self._template is None or not self._fitting.in_windows,
            f"PoolerConfig: enable_chunked_processing is not supported for {loaded.config.name}, which reads each text "
            "in its chat template",
        )
        self._token_vectors: TokenVectorPrompts | None = None
        if loaded.multi_vector is not None:
            self._token_vectors = TokenVectorPrompts(
                loaded.multi_vector, loaded.config.name, self._encoding, self._fitting, self._assembly
            )
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
        asked = options.lora_request if options.lora_request is not None else self._encoding.task(options)
        adapters = find_adapters(self._lora, asked, len(prompts))
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
        if PoolingTask.TOKEN_EMBED in tasks and self._token_vectors is not None:
            return self._token_vectors.requests(prompts, plans, options)
        return self._requests(prompts, plans, options)

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

    def _requests(
        self, prompts: Sequence[Any], plans: Sequence[tuple[PoolingPlan, ...]], options: PromptOptions
    ) -> list[Request]:
        """Requests for prompts that are run as they are, with one prompt before all of them."""
        limit, side = self._fitting.limit(options.truncate_prompt_tokens), self._encoding.side(options)
        prefix, skip = self._encoding.prefix(options)
        around: tuple[list[int], list[int]] | None = None
        if self._template is not None and not options.is_rendered:
            prompts = [self._template.apply(one, index, prefix, self._images) for index, one in enumerate(prompts)]
            around, skip, prefix = ([], self._template.ending(prefix)), 0, ""
            options = replace(options, special_tokens=False)
        spans = [prompt if isinstance(prompt, SpannedPrompt) else None for prompt in prompts]
        checked = [check_prompt(p.prompt if isinstance(p, SpannedPrompt) else p, i) for i, p in enumerate(prompts)]
        if limit is None:
            self._fitting.refuse_endless(checked)
        options.refuse_prompt_before_ids(checked)
        whole = [prefix + prompt for prompt in checked if isinstance(prompt, str)]
        encoded = self._encoding.encode(whole, special_tokens=options.special_tokens)
        texts = iter(zip(encoded, self._encoding.skips(checked, encoded, skip), strict=True))
        pieces = self._encoding.pieces(checked, prefix)
        way = _Way(options=options, limit=limit, side=side, prefix=prefix, skip=skip, around=around, pieces=pieces)
        requests = []
        for index, (prompt, spanned, (plan, *others)) in enumerate(zip(checked, spans, plans, strict=True)):
            tokens, images = self._fit(prompt, index, way, next(texts) if isinstance(prompt, str) else None)
            for one in (plan, *others):
                self._assembly.check(tokens, index, one)
            if images is None:
                self._images.refuse_image_tokens(tokens.ids, index)
            if spanned is not None:
                plan = replace(plan, spans=self._spans(spanned, index, tokens, way))
            best = isinstance(prompt, (TextPair, TemplatedPrompt))
            also = tuple(self._assembly.request(tokens, one, index, best=best, images=images) for one in others)
            requests.append(self._assembly.request(tokens, plan, index, best=best, images=images, also=also))
        return requests

    def _fit(
        self, prompt: Any, index: int, way: _Way, text: tuple[list[int], int] | None
    ) -> tuple[Fitted, ImageInputs | None]:
        """One prompt's token ids, cut or in windows, and its images; of a `text` its ids and how many are skipped."""
        fitting = self._fitting
        if isinstance(prompt, ImagePrompt):
            ids, images = self._images.encode(prompt, index, special_tokens=way.options.special_tokens)
            return Fitted(ids), images
        if isinstance(prompt, TextPair):
            first, second = way.pieces[way.prefix + prompt.first], way.pieces[prompt.second]
            return fitting.pair(first, second, index, way.limit, side=way.side, skip=way.skip), None
        if isinstance(prompt, TemplatedPrompt):
            side = way.options.truncation_side or "right"
            return fitting.templated(prompt, way.pieces, index, way.limit, side=side), None
        if text is None:
            return fitting.single(prompt, index, way.limit, side=way.side, prefix="", skip=0), None
        ids, skip = text
        tokens = fitting.single(
            ids, index, way.limit, side=way.side, prefix=way.prefix, skip=skip, around=way.around or self._images.around
        )
        return tokens, None

    def _spans(self, prompt: SpannedPrompt, index: int, tokens: Fitted, way: _Way) -> tuple[tuple[int, int], ...]:
        """The tokens of each span, for a model whose embedding is the mean of its tokens' states."""
        refuse_unless_mean(self.loaded.facts.embed_types, self.loaded.config.name)
        count, offsets = len(tokens.ids), None
        if isinstance(prompt.prompt, str):
            offsets = self._encoding.offsets(prompt.prompt, way.prefix, count, tokens.truncated, way.side)
        return token_spans(prompt, index, count, offsets)

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
            chosen, asked = options.or_prompt(self._prompt_of(side)), [prompts[index] for index in places]
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

    def _prompt_of(self, side: bool | None) -> str | None:
        """The name of the prompt that the checkpoint has for a side."""
        if side is None:
            return None
        names = ("query",) if side else ("document", "passage", "corpus")
        return next((name for name in names if name in self.loaded.recipe.prompts), None)

    def _looked_up(self, prompts: Sequence[Any], plans: Sequence[PoolingPlan], options: PromptOptions) -> list[Request]:
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        options.refuse_prompt_before_ids(checked)
        prefix, _ = self._encoding.prefix(options)
        texts: list[str | list[int]] = []
        for index, prompt in enumerate(checked):
            if not isinstance(prompt, (str, list)):
                raise InvalidPromptError(f"input {index} is a pair of texts, and these are read each by itself")
            texts.append(prefix + prompt if isinstance(prompt, str) else prompt)
        limit = options.truncate_prompt_tokens
        if limit is not None and limit != -1:
            self._fitting.limit(limit)  # checks it
        side = None if options.truncation_side is None else self._encoding.side(options)
        names = [self._assembly.next_name() for _ in texts]
        return self._lookup.requests(texts, plans, names, None if limit == -1 else limit, side=side)

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Start and end in characters of each of a request's tokens in its text, without the prompt before it."""
        text = check_prompt(prompt, 0)
        if not isinstance(text, str) or self.tokenizer is None or self._template is not None:
            return None
        kept, truncated = len(request.token_ids), request.num_truncated_tokens
        return self._encoding.offsets(text, self.prompt_text(options), kept, truncated, self._encoding.side(options))

    def kept_places(self, ids: list[int], options: PromptOptions) -> Sequence[int]:
        """Which of a text's token ids, special ones included, are left where the options cut it."""
        limit, side = self._fitting.limit(options.truncate_prompt_tokens), self._encoding.side(options)
        if limit is None or len(ids) <= limit:
            return range(len(ids))
        tokenizer = self._fitting.need_tokenizer()
        return kept_positions(ids, limit, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)

    def prompt_text(self, options: PromptOptions) -> str:
        """The text that is put before each input: the one given, the named one, or the checkpoint's default one."""
        return self._encoding.prefix(options)[0]

"""The engine: submit -> plan -> tokenise -> schedule -> run -> resolve.

One thread owns the device. Whoever has prompts calls `prepare`, which checks, plans and tokenises all of them before
any is run, then `submit`, which queues them and returns; each request's future becomes its result or its error.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anypool.adapters.load import LoadedModel, load_pooling_model
from anypool.config import EngineConfig
from anypool.engine.batch import make_batch
from anypool.engine.prompts import Prompt, check_prompt, check_text
from anypool.engine.request import Request
from anypool.engine.scheduler import Scheduler
from anypool.engine.tokenization import Tokenizer, truncate
from anypool.errors import (
    AnypoolError,
    ConfigError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    InvalidPromptError,
    NonFiniteResultError,
    OverloadedError,
    PromptTooLongError,
)
from anypool.model_executor.pooling_model_runner import PoolingModelRunner
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.params import PoolingParams
from anypool.pooling.plan import PoolingPlan, make_plan
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer_config.json",
)


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


class Engine:
    """A loaded model and the thread that runs it.

    Args:
        config: What to load and how.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.loaded: LoadedModel = load_pooling_model(config)
        self.tokenizer = _load_tokenizer(config, self.loaded)
        self.max_model_len = _max_model_len(config, self.loaded, self.tokenizer)
        on_cpu = self.loaded.device.type == "cpu"
        self.config = config.replace(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens or (4096 if on_cpu else 16384),
            served_model_name=config.served_model_name or config.model,
        )
        assert self.config.max_num_batched_tokens is not None
        self._runner = PoolingModelRunner(self.loaded.model, self.loaded.device)
        self._scheduler = Scheduler(max_tokens=self.config.max_num_batched_tokens, max_seqs=self.config.max_num_seqs)
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._running: list[Request] = []
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="anypool-device", daemon=True)
        self._thread.start()
        atexit.register(_close, weakref.ref(self))

    @property
    def supported_tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks that the loaded model serves."""
        return self.loaded.defaults.tasks

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread.is_alive() and not self._closing

    # 1. Check, plan, tokenise.

    def prepare(
        self,
        prompts: Sequence[Prompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        options: PromptOptions | None = None,
    ) -> list[Request]:
        """Turns prompts into requests. Nothing is queued, so an error costs no other prompt anything.

        Args:
            prompts: Texts, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`.
            task: What each gets.
            params: For all of them, or one per prompt.
            options: How prompts become token ids.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served; the message names it.
        """
        options = options or PromptOptions()
        plans = self._plans(len(prompts), task, params)
        limit = self._truncation_limit(options)
        prefix, skip = self._prompt_prefix(options)
        checked = [check_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        token_ids = self._tokenize(checked, prefix, explicit=options.prompt_name is not None or bool(options.prompt))
        requests = []
        for index, (ids, plan) in enumerate(zip(token_ids, plans, strict=True)):
            kept = self._fit(ids, index, limit, options.truncation_side)
            pooled_from = skip if isinstance(checked[index], str) else 0
            self._check_ids(kept, index, pooled_from)
            requests.append(
                Request(
                    request_id=str(next(self._ids)),
                    token_ids=kept,
                    plan=plan,
                    skip=pooled_from,
                    num_truncated_tokens=len(ids) - len(kept),
                )
            )
        return requests

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

    def _tokenize(self, prompts: Sequence[str | list[int]], prefix: str, *, explicit: bool) -> list[list[int]]:
        texts = [prefix + prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise InvalidPromptError(
                f"{self.loaded.config.name} was loaded without a tokenizer: give token ids, or pass tokenizer="
            )
        if explicit and len(texts) < len(prompts):
            raise InvalidParameterError(
                "a prompt is put before text and not before token ids: give texts, or ids that hold the prompt",
                param="prompt_name",
            )
        encoded = iter(self.tokenizer.encode(texts) if self.tokenizer is not None and texts else ())
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _fit(self, ids: list[int], index: int, limit: int | None, side: str | None) -> list[int]:
        if side not in (None, "left", "right"):
            raise InvalidParameterError(
                f"truncation_side={side!r} is neither 'left' nor 'right'", param="truncation_side"
            )
        if limit is not None:
            tokenizer = self.tokenizer
            if tokenizer is None:
                return truncate(ids, limit, side=side or "right")
            side = side or tokenizer.truncation_side
            return truncate(ids, limit, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)
        if len(ids) > self.max_model_len:
            raise PromptTooLongError(
                f"input {index} has {len(ids):,} tokens, the limit is {self.max_model_len:,}: "
                "pass truncate_prompt_tokens=-1, or split the text"
            )
        return ids

    def _check_ids(self, ids: list[int], index: int, skip: int) -> None:
        if not ids:
            raise InvalidPromptError(
                f"input {index} has no tokens: it is empty, and this model's tokenizer adds no special tokens"
            )
        vocab = self.loaded.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise InvalidPromptError(f"input {index} has the token id {wrong}; this model's ids are 0 to {vocab - 1}")
        if skip >= len(ids):
            raise InvalidPromptError(
                f"input {index} has no tokens left to pool: all {len(ids)} belong to the prompt, "
                "which this model leaves out of pooling"
            )

    # 2. Queue.

    def submit(self, requests: Sequence[Request], *, bounded: bool = False) -> None:
        """Queues requests; their futures become results or errors.

        Args:
            requests: From `prepare`.
            bounded: Whether a full queue refuses them, as a server's does.

        Raises:
            OverloadedError: The queue is full.
            EngineDeadError: The engine is closed or its thread has died.
        """
        with self._changed:
            if not self.is_alive:
                raise EngineDeadError(self._end_message())
            new, most = sum(map(len, requests)), self.config.max_queued_tokens
            if bounded and self._scheduler.waiting_tokens + new > most:
                self._scheduler.drop_cancelled()
            waiting = self._scheduler.waiting_tokens
            if bounded and waiting > 0 and waiting + new > most:
                raise OverloadedError(f"{waiting:,} tokens are waiting, and the queue takes {most:,}: try again later")
            self._scheduler.add(requests)
            self._changed.notify()

    # 3. Run, on the device thread.

    def _serve(self) -> None:
        try:
            while (requests := self._next()) is not None:
                self._running = requests
                self._run(requests)
                self._running = []
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._death = error
            logger.exception("the device thread died")
        finally:
            self._fail_waiting()

    def _next(self) -> list[Request] | None:
        """The next batch, waiting for one; None when the engine closes."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                requests = self._scheduler.next_batch()
                if requests:
                    return requests
                if not self._scheduler:
                    self._changed.wait()

    def _run(self, requests: list[Request]) -> None:
        """Runs a batch. One that raises is halved until the request that causes it stands alone."""
        try:
            results = self._runner.run(make_batch(requests, self.loaded.device), [request.plan for request in requests])
        except Exception as error:  # anything a model may raise; it goes to the request that caused it
            if len(requests) == 1:
                _fail(requests[0], error)
                return
            logger.warning("a batch of %d raised %s; running it in halves", len(requests), type(error).__name__)
            middle = len(requests) // 2
            self._run(requests[:middle])
            self._run(requests[middle:])
            return
        for request, result in zip(requests, results, strict=True):
            _resolve(request, result)

    # 4. End.

    def close(self) -> None:
        """Finishes the running batch, fails what waits, and stops the thread."""
        if not self._thread.is_alive():
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _fail_waiting(self) -> None:
        with self._changed:
            self._closing = True
            waiting = self._scheduler.drain()
        error = EngineDeadError(self._end_message())
        for request in waiting:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)
        for request in self._running:  # what the thread died over
            if not request.future.done():
                request.future.set_exception(error)

    def _end_message(self) -> str:
        return "the engine is shut down" if self._death is None else f"the device thread died: {self._death!r}"


def _fail(request: Request, error: Exception) -> None:
    if isinstance(error, AnypoolError):
        request.future.set_exception(error)
        return
    failure = EngineError(f"request {request.request_id}: the model raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    request.future.set_exception(failure)


def _resolve(request: Request, result: torch.Tensor) -> None:
    if torch.isfinite(result).all():
        request.future.set_result(result)
    else:
        request.future.set_exception(
            NonFiniteResultError(
                f"request {request.request_id}: the model gave NaN or infinity; "
                "a wider dtype (dtype='float32') often helps"
            )
        )


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()


def _load_tokenizer(config: EngineConfig, loaded: LoadedModel) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        repository = Repository.open(config.tokenizer, cache_dir=config.download_dir)
    else:
        repository = loaded.repository.subfolder(loaded.recipe.backbone)
        if repository.gguf is None and not any(map(repository.exists, _TOKENIZER_FILES)):
            logger.warning("%s has no tokenizer: prompts must be token ids", loaded.config.name)
            return None
    return Tokenizer.load(
        repository, do_lower_case=loaded.recipe.do_lower_case, trust_remote_code=config.trust_remote_code
    )


def _max_model_len(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> int:
    """The user's limit, else the recipe's, else the tokenizer's; never more than the position embeddings allow."""
    most = loaded.config.max_positions
    if config.max_model_len is not None:
        if config.max_model_len > most:
            raise ConfigError(
                f"max_model_len={config.max_model_len:,} is more than {loaded.config.name} has positions for, {most:,}"
            )
        return config.max_model_len
    stated = loaded.recipe.max_seq_length
    if stated is None and tokenizer is not None:
        stated = tokenizer.max_length
    return most if stated is None else min(stated, most)

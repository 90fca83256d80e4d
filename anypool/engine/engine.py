"""The engine: submit -> plan -> tokenise -> schedule -> run -> resolve.

One thread owns the device. Whoever has prompts calls `prepare`, which checks, plans and tokenises all of them before
any is run, then `submit`, which queues them and returns; each request's future becomes its result or its error.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Sequence

import torch

from anypool.adapters.load import LoadedModel, OpenedModel, load_pooling_model, open_model
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import EngineConfig
from anypool.engine.batch import make_batch
from anypool.engine.preparation import Preparation, PromptOptions
from anypool.engine.prompts import Prompt, TextPair
from anypool.engine.request import Request
from anypool.engine.scheduler import Scheduler
from anypool.engine.tokenization import Tokenizer
from anypool.errors import (
    AnypoolError,
    ConfigError,
    EngineDeadError,
    EngineError,
    NonFiniteResultError,
    OverloadedError,
)
from anypool.model_executor.cpu import keep_freed_memory, set_up_threads
from anypool.model_executor.pooling_model_runner import PoolingModelRunner
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.params import PoolingParams
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


class Engine:
    """A loaded model and the thread that runs it.

    Args:
        config: What to load and how.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        set_up_threads()
        opened = open_model(config)
        self.tokenizer = _load_tokenizer(config, opened)
        token_id = None if self.tokenizer is None else self.tokenizer.token_id
        self.loaded: LoadedModel = load_pooling_model(config, opened, token_id=token_id)
        self.max_model_len = _max_model_len(config, self.loaded, self.tokenizer)
        on_cpu = self.loaded.device.type == "cpu"
        if on_cpu:
            keep_freed_memory()
        self.config = config.replace(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens or (4096 if on_cpu else 16384),
            served_model_name=config.served_model_name or config.model,
        )
        assert self.config.max_num_batched_tokens is not None
        self._preparation = Preparation(self.loaded, self.tokenizer, self.max_model_len)
        self._runner = PoolingModelRunner(self.loaded.model, self.loaded.device)
        self._scheduler = Scheduler(max_tokens=self.config.max_num_batched_tokens, max_seqs=self.config.max_num_seqs)
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
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        options: PromptOptions | None = None,
    ) -> list[Request]:
        """Turns prompts into requests. Nothing is queued, so an error costs no other prompt anything.

        Args:
            prompts: Texts, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`; for scores also pairs.
            task: What each gets.
            params: For all of them, or one per prompt.
            options: How prompts become token ids.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served; the message names it.
        """
        return self._preparation.prepare(prompts, task, params, options or PromptOptions())

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Where a request's tokens stand in the text it came from; None where it came from token ids."""
        return self._preparation.offsets(prompt, request, options)

    def prompt_text(self, options: PromptOptions) -> str:
        """The text that these options put before each input."""
        return self._preparation.prompt_text(options)

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
            batch = make_batch(requests, self.loaded.device, pad_token_id=self.loaded.config.pad_token_id)
            results = self._runner.run(batch, [request.plan for request in requests])
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
                "its weights may be damaged, or its dtype too narrow"
            )
        )


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()


def _load_tokenizer(config: EngineConfig, opened: OpenedModel) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        repository = Repository.open(config.tokenizer, cache_dir=config.download_dir)
    else:
        repository = opened.backbone
        if repository.gguf is None and not any(map(repository.exists, _TOKENIZER_FILES)):
            logger.warning("%s has no tokenizer: prompts must be token ids", opened.config.name)
            return None
    return Tokenizer.load(
        repository, do_lower_case=opened.recipe.do_lower_case, trust_remote_code=config.trust_remote_code
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

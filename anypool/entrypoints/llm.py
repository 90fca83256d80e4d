"""`LLM`: the engine from Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from anypool.config import EngineConfig
from anypool.engine.engine import Engine, PromptOptions
from anypool.engine.prompts import Prompt, as_prompt_list
from anypool.engine.request import Request
from anypool.errors import InvalidParameterError
from anypool.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask, encode2pooling_task, parse_task

OutputT = TypeVar("OutputT")


class LLM:
    """A language model as a pooling model.

    Args:
        model: A folder, a `.gguf` file or a hub id.
        **engine_args: The fields of `EngineConfig`, such as `dtype`, `max_model_len`, `pooler_config`,
            `hf_overrides`, `tokenizer`, `revision` and `trust_remote_code`.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: An argument is unknown, or contradicts the checkpoint.

    Example:
        >>> llm = LLM("sentence-transformers/all-MiniLM-L6-v2")
        >>> [output] = llm.embed("How tall is the Eiffel Tower?")
        >>> output.outputs.numpy().shape
        (384,)
    """

    def __init__(self, model: str | os.PathLike[str], **engine_args: Any) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.engine = Engine(EngineConfig.from_kwargs(model=name, **engine_args))

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the loaded model serves."""
        return tuple(task.value for task in self.engine.supported_tasks)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts.

        Args:
            prompts: A text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of these.
            pooling_params: Dimensions and normalisation, for all prompts or one per prompt.
            prompt_name: Which of the checkpoint's prompts to put before each text; None for its default one.
            prompt: Text to put before each text, in place of a named prompt.
            use_tqdm: Whether to show a progress bar, or a factory of one.
            truncate_prompt_tokens: Cut longer prompts to this many tokens, special ones kept; -1 for the model's limit.
            truncation_side: "right" or "left": the end that is cut; None for the tokenizer's own.
            tokenization_kwargs: `truncate_prompt_tokens` and `truncation_side` in a dictionary.

        Returns:
            One output per prompt, in the order given; an empty list for an empty list.

        Raises:
            InvalidRequestError: A prompt or parameter cannot be served; nothing has been run then.
            EngineError: The engine failed on a prompt.
        """
        options = _options(prompt_name, prompt, truncate_prompt_tokens, truncation_side, tokenization_kwargs)
        requests, results = self._run(prompts, PoolingTask.EMBED, pooling_params, options, use_tqdm)
        return [
            EmbeddingRequestOutput(
                request_id=request.request_id,
                outputs=EmbeddingOutput(result),
                prompt_token_ids=request.token_ids,
                num_truncated_tokens=request.num_truncated_tokens,
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Runs any task and returns its raw result.

        Args:
            pooling_task: "embed" or "token_embed". None and "encode" mean token_embed, and warn.

        The other arguments, the result's order and the errors are those of `embed`. `outputs.data` is `[E]` for
        "embed" and `[tokens, E]` for "token_embed".
        """
        if pooling_task is None or pooling_task == "encode":
            task = encode2pooling_task(self.engine.supported_tasks)
            warnings.warn(
                f"encode() without a task means pooling_task={task.value!r} here; say so, or call embed()",
                DeprecationWarning,
                stacklevel=2,
            )
        else:
            task = parse_task(pooling_task)
        options = _options(prompt_name, prompt, truncate_prompt_tokens, truncation_side, tokenization_kwargs)
        requests, results = self._run(prompts, task, pooling_params, options, use_tqdm)
        return [
            PoolingRequestOutput(
                request_id=request.request_id,
                outputs=PoolingOutput(result),
                prompt_token_ids=request.token_ids,
                num_truncated_tokens=request.num_truncated_tokens,
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None,
        options: PromptOptions,
        use_tqdm: bool | Callable[..., tqdm[Any]],
    ) -> tuple[list[Request], list[torch.Tensor]]:
        listed, _ = as_prompt_list(prompts)
        requests = self.engine.prepare(listed, task, params, options)
        self.engine.submit(requests)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        bar = make_bar(total=len(requests), desc=task.value, unit="prompt", disable=use_tqdm is False)
        try:
            results = []
            for request in requests:
                results.append(request.future.result())
                bar.update()
            return requests, results
        finally:
            bar.close()
            for request in requests:  # after an error or an interrupt nobody wants the rest
                request.future.cancel()

    def close(self) -> None:
        """Stops the engine. Using the object afterwards raises `EngineDeadError`."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()


def _options(
    prompt_name: str | None,
    prompt: str | None,
    truncate_prompt_tokens: int | None,
    truncation_side: str | None,
    tokenization_kwargs: dict[str, Any] | None,
) -> PromptOptions:
    values: dict[str, Any] = {"truncate_prompt_tokens": truncate_prompt_tokens, "truncation_side": truncation_side}
    for key, value in (tokenization_kwargs or {}).items():
        if key not in values:
            raise InvalidParameterError(f"tokenization_kwargs has {key!r}; known: {', '.join(values)}", param=key)
        values[key] = value
    return PromptOptions(prompt_name=prompt_name, prompt=prompt, **values)

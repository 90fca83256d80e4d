"""`LLM`: the engine from Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, overload

import torch
from tqdm import tqdm

from anypool.adapters.heads import labels_of
from anypool.adapters.rerank_templates import ChatTemplate
from anypool.config import EngineConfig, LoRARequest, is_int
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import Prompt, as_given, as_prompt_list, check_text
from anypool.engine.replicas import start_engine
from anypool.engine.request import Request, leaves
from anypool.engine.spans import check_span_lists, check_spans
from anypool.entrypoints.scoring import Scores, as_pairs, as_query_and_documents, score_pairs
from anypool.errors import InvalidParameterError
from anypool.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    MultiTaskOutput,
    MultiTaskRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
    SpanEmbeddingOutput,
    SpanEmbeddingRequestOutput,
    SparseEmbeddingOutput,
    SparseEmbeddingRequestOutput,
    TokenClassificationOutput,
    TokenClassificationRequestOutput,
)
from anypool.pooling.params import PoolingParams
from anypool.pooling.sparse import unpack_weights
from anypool.pooling.tasks import PoolingTask, encode2pooling_task, parse_task

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What is compared with something: a text, or a mapping with images.
Scored = str | Mapping[str, Any]


class PromptArguments(TypedDict, total=False):
    """What every method takes about its prompts.

    Attributes:
        prompt_name: Which of the checkpoint's prompts to put before each text; None for its default one.
        prompt: Text to put before each text, in place of a named prompt.
        use_tqdm: Whether to show a progress bar, or a factory of one.
        truncate_prompt_tokens: Cut longer prompts to this many tokens, special ones kept; -1 for the model's limit.
        truncation_side: "right" or "left": the end that is cut; None for the tokenizer's own.
        tokenization_kwargs: `truncate_prompt_tokens` and `truncation_side` in a dictionary.
        lora_request: The LoRA adapter that prompts are run with, or the name of one of `lora_modules`; for all prompts,
            or one per prompt, in which None is the model as it is.
    """

    prompt_name: str | None
    prompt: str | None
    use_tqdm: bool | Callable[..., tqdm[Any]]
    truncate_prompt_tokens: int | None
    truncation_side: str | None
    tokenization_kwargs: dict[str, Any] | None
    lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None


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
        self.engine = start_engine(EngineConfig.from_kwargs(model=model, **engine_args))

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the loaded model serves."""
        return tuple(task.value for task in self.engine.supported_tasks)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts.

        Args:
            prompts: A text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, for models that read images
                `{"multi_modal_data": {"image": ...}}` with or without a `prompt`, or a list of these.
            pooling_params: Dimensions and normalisation, for all prompts or one per prompt.
            **arguments: The fields of `PromptArguments`.

        Returns:
            One output per prompt, in the order given; an empty list for an empty list.

        Raises:
            InvalidRequestError: A prompt or parameter cannot be served; nothing has been run then.
            EngineError: The engine failed on a prompt.
        """
        requests, results = self._run(prompts, PoolingTask.EMBED, pooling_params, arguments)
        return [
            EmbeddingRequestOutput(**_common(request), outputs=EmbeddingOutput(result))
            for request, result in zip(requests, results, strict=True)
        ]

    def embed_spans(
        self,
        prompts: Prompt | Sequence[Prompt],
        spans: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        unit: str = "characters",
        **arguments: Unpack[PromptArguments],
    ) -> list[SpanEmbeddingRequestOutput]:
        """Embeds spans of prompts, each in the light of its whole prompt, which is run once (late chunking).

        A span's vector is the mean of its tokens' states, finished as any embedding of the model: so it takes a model
        that pools by MEAN. Günther et al., arXiv:2409.04701.

        Args:
            prompts: As for `embed`.
            spans: Pairs of start and end, the end not included, at least one: a list of them for one prompt, a list of
                such lists for a list of prompts. They may overlap.
            pooling_params: As for `embed`.
            unit: "characters" of the text, where a token belongs to a span if they share a character, or "tokens",
                places in `prompt_token_ids`.
            **arguments: As for `embed`.

        Returns:
            One output per prompt; `outputs.data` is `[spans, E]`.

        Raises:
            InvalidRequestError: As for `embed`; a span covers no token or ends after its prompt; or the model does not
                pool by MEAN.
        """
        listed, is_one = as_prompt_list(prompts)
        lists = [spans] if is_one else check_span_lists(spans, len(listed))
        spanned = [
            check_spans(prompt, one, unit, index) for index, (prompt, one) in enumerate(zip(listed, lists, strict=True))
        ]
        requests, results = self._submit(
            spanned, PoolingTask.EMBED, pooling_params, _options(arguments), arguments.get("use_tqdm", True)
        )
        return [
            SpanEmbeddingRequestOutput(
                **_common(request), outputs=SpanEmbeddingOutput(result, token_spans=list(request.plan.spans))
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def sparse_embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        is_query: bool | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[SparseEmbeddingRequestOutput]:
        """A sparse vector per prompt, with `outputs.indices`, `outputs.values` and `outputs.size`.

        Arguments and errors are as for `embed`.

        Args:
            prompts: As for `embed`.
            pooling_params: `max_active_dims` keeps only the largest weights.
            is_query: Whether the prompts are queries or documents, for the checkpoint's own prompts and, in a model
                with a router, its ways for them. Its default way where neither this nor `pooling_params` says so.
            **arguments: As for `embed`.
        """
        params = _of_side(pooling_params, is_query)
        requests, results = self._run(prompts, PoolingTask.SPARSE_EMBED, params, arguments)
        return [
            SparseEmbeddingRequestOutput(**_common(request), outputs=self._sparse(result))
            for request, result in zip(requests, results, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[ClassificationRequestOutput]:
        """Scores prompts by label; `outputs.probs`, `outputs.label`. Arguments and errors as for `embed`."""
        requests, results = self._run(prompts, PoolingTask.CLASSIFY, pooling_params, arguments)
        return [
            ClassificationRequestOutput(
                **_common(request), outputs=ClassificationOutput(result, labels=self._labels(request, result))
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[PoolingRequestOutput]:
        """Rewards prompts. Arguments and errors as for `embed`.

        `outputs.data` is `[1]` for a reward model, `[steps, 1]` for a process-reward model, and `[tokens, D]`, the raw
        hidden states, for a causal LM without a head.
        """
        return self._raw(prompts, PoolingTask.REWARD, pooling_params, arguments)

    def token_embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        is_query: bool | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[PoolingRequestOutput]:
        """One vector per token; `outputs.data` is `[tokens, D]`. Arguments and errors as for `embed`.

        A multi-vector model, such as a ColBERT, reads queries and documents each in its way and projects its states:
        `[vectors, E]`, of which a query may have more than tokens, and a document fewer.

        Args:
            prompts: As for `embed`.
            pooling_params: As for `embed`; also `pool_factor` and `token_pooling`, for documents of such a model.
            is_query: For such a model: whether the prompts are queries; documents where neither this nor
                `pooling_params` says so.
            **arguments: As for `embed`.
        """
        return self._raw(prompts, PoolingTask.TOKEN_EMBED, _of_side(pooling_params, is_query), arguments)

    def token_classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[TokenClassificationRequestOutput]:
        """Scores each token by label, with its place in the text. Arguments and errors as for `embed`."""
        listed, _ = as_prompt_list(prompts)
        requests, results = self._run(listed, PoolingTask.TOKEN_CLASSIFY, pooling_params, arguments)
        offsets = [
            self.engine.offsets(prompt, request, _options(arguments))
            for prompt, request in zip(listed, requests, strict=True)
        ]
        return [
            TokenClassificationRequestOutput(
                **_common(request),
                outputs=TokenClassificationOutput(
                    result,
                    labels=self._labels(request, result),
                    offsets=place if place and len(place) == len(result) else None,
                ),
            )
            for request, result, place in zip(requests, results, offsets, strict=True)
        ]

    @overload
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[PoolingRequestOutput]: ...

    @overload
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: list[str] | tuple[str, ...],
        **arguments: Unpack[PromptArguments],
    ) -> list[MultiTaskRequestOutput]: ...

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | list[str] | tuple[str, ...] | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> list[PoolingRequestOutput] | list[MultiTaskRequestOutput]:
        """Runs any task and returns its raw result, `outputs.data`. Arguments and errors as for `embed`.

        Several tasks run each prompt once: `outputs.embed`, `outputs.sparse_embed` and so on.

        Args:
            prompts: As for `embed`.
            pooling_params: As for `embed`. Of several tasks each takes the fields that it knows.
            pooling_task: A name in `supported_tasks`, or a list of them. None and "encode" mean token_embed, and warn.
            **arguments: As for `embed`.
        """
        if pooling_task is None or pooling_task == "encode":
            task = encode2pooling_task(self.engine.supported_tasks)
            warnings.warn(
                f"encode() without a task means pooling_task={task.value!r} here; say so, or call embed()",
                DeprecationWarning,
                stacklevel=2,
            )
        else:
            if isinstance(pooling_task, (list, tuple)):
                return self._several(prompts, [parse_task(name) for name in pooling_task], pooling_params, arguments)
            task = parse_task(pooling_task)
        return self._raw(prompts, task, pooling_params, arguments)

    def _several(
        self,
        prompts: Prompt | Sequence[Prompt],
        tasks: Sequence[PoolingTask],
        params: PoolingParams | Sequence[PoolingParams] | None,
        arguments: PromptArguments,
    ) -> list[MultiTaskRequestOutput]:
        requests, _ = self._run(prompts, tasks, params, arguments)
        outputs = []
        for request in requests:
            found = {
                one.plan.task.value: self._output(one, result)
                for one, result in zip((request, *request.also), request.results, strict=True)
            }
            outputs.append(MultiTaskRequestOutput(**_common(request), outputs=MultiTaskOutput(**found)))
        return outputs

    def _output(self, request: Request, result: torch.Tensor) -> Any:
        match request.plan.task:
            case PoolingTask.EMBED:
                return EmbeddingOutput(result)
            case PoolingTask.SPARSE_EMBED:
                return self._sparse(result)
            case PoolingTask.CLASSIFY:
                return ClassificationOutput(result, labels=self._labels(request, result))
            case PoolingTask.TOKEN_CLASSIFY:
                return TokenClassificationOutput(result, labels=self._labels(request, result))
        return PoolingOutput(result)

    def score(
        self,
        data_1: Scored | Sequence[Scored],
        data_2: Scored | Sequence[Scored],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
        fuse: bool | Sequence[float] = False,
        **arguments: Unpack[PromptArguments],
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts, one with one, one with several, or several with as many.

        A cross-encoder or reranker reads the pair. A multi-vector model compares token vectors by MaxSim, the first
        text of a pair as the query. Any other model compares embeddings, by the checkpoint's own similarity or by
        cosine. Pairs that are too long are cut, a reranker's template never; pass `truncate_prompt_tokens=None` to get
        an error instead. With `enable_chunked_processing` they are not cut: the second text is run in windows, and the
        highest score counts.

        Args:
            data_1: The first text of each pair, or the one of all: the query. A model that compares vectors and reads
                images takes `{"multi_modal_data": {"image": ...}}` in place of a text, on either side.
            data_2: The second texts: the documents.
            pooling_params: Such as `activation`, for cross-encoders.
            chat_template: Jinja template of the prompt, or the name of a file, in place of the model's own.
            instruction: For templates that take one.
            fuse: For BGE-M3: the weights of dense, sparse and token vectors in one score; True for 0.4, 0.2 and 0.4.
            **arguments: As for `embed`.

        Raises:
            InvalidRequestError: The numbers of texts do not fit, or the model gives several labels.
        """
        left, right = as_pairs(data_1, data_2)
        scores = self._scores(left, right, pooling_params, chat_template, instruction, fuse, arguments, roles=False)
        return [
            ScoringRequestOutput(
                request_id=requests[0].request_id,
                outputs=ScoringOutput(score),
                prompt_token_ids=[i for request in requests for i in request.token_ids],
                num_cached_tokens=sum(map(_num_cached_tokens, requests)),
                num_truncated_tokens=sum(request.num_truncated_tokens for request in requests),
                num_windows=max(_num_windows(request) for request in requests),
            )
            for score, requests in scores
        ]

    def rerank(
        self,
        query: Scored,
        documents: Sequence[Scored],
        top_n: int | None = None,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
        fuse: bool | Sequence[float] = False,
        **arguments: Unpack[PromptArguments],
    ) -> list[RerankResult]:
        """Documents by relevance to a query, best first. Arguments and errors as for `score`.

        An embedding model puts its own prompts, where it has some, before the query and the documents.

        Args:
            query: The query.
            documents: The documents.
            top_n: How many to return; None and 0 return all.
            pooling_params: As for `score`.
            chat_template: As for `score`.
            instruction: As for `score`.
            fuse: As for `score`.
            **arguments: As for `embed`.
        """
        left, right = as_query_and_documents(query, documents)
        if top_n is not None and (not is_int(top_n) or top_n < 0):
            raise InvalidParameterError(f"top_n={top_n!r} is not a number of documents", param="top_n")
        scores = self._scores(left, right, pooling_params, chat_template, instruction, fuse, arguments, roles=True)
        ranked = sorted(enumerate(scores), key=lambda entry: -float(entry[1][0]))
        return [
            RerankResult(index=index, document=as_given(right[index]), relevance_score=float(score))
            for index, (score, _) in ranked[: top_n or None]
        ]

    def _scores(
        self,
        left: list[Any],
        right: list[Any],
        params: PoolingParams | None,
        chat_template: str | None,
        instruction: str | None,
        fuse: bool | Sequence[float],
        arguments: PromptArguments,
        *,
        roles: bool,
    ) -> Scores:
        if params is not None and not isinstance(params, PoolingParams):
            raise InvalidParameterError(
                f"pooling_params={params!r} is not a PoolingParams; pairs of a call share one", param="pooling_params"
            )
        if instruction is not None:
            if not isinstance(instruction, str):
                raise InvalidParameterError(f"instruction={instruction!r} is not a text", param="instruction")
            check_text(instruction, "instruction")
        if isinstance(arguments.get("lora_request"), (list, tuple)):
            raise InvalidParameterError(
                "lora_request is a list: the texts of a call are compared by one adapter, so give one",
                param="lora_request",
            )
        config = self.engine.config.pooler_config
        in_windows = config is not None and config.enable_chunked_processing
        arguments = {"truncate_prompt_tokens": None if in_windows else -1, **arguments}

        def run(
            prompts: Sequence[Any],
            task: PoolingTask | Sequence[PoolingTask],
            params: PoolingParams | None,
            options: PromptOptions,
        ) -> tuple[list[Request], list[torch.Tensor]]:
            return self._submit(prompts, task, params, options, arguments.get("use_tqdm", True))

        return score_pairs(
            self.engine,
            run,
            left,
            right,
            params=params,
            options=_options(arguments),
            template=ChatTemplate(chat_template) if chat_template is not None else None,
            instruction=instruction,
            roles=roles,
            fuse=fuse,
        )

    def _raw(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None,
        arguments: PromptArguments,
    ) -> list[PoolingRequestOutput]:
        requests, results = self._run(prompts, task, params, arguments)
        return [
            PoolingRequestOutput(**_common(request), outputs=PoolingOutput(result))
            for request, result in zip(requests, results, strict=True)
        ]

    def _sparse(self, result: torch.Tensor) -> SparseEmbeddingOutput:
        defaults = self.engine.loaded.defaults.sparse
        assert defaults is not None
        indices, values = unpack_weights(result)
        return SparseEmbeddingOutput(values, indices, defaults.size)

    def _labels(self, request: Request, result: torch.Tensor) -> Mapping[int, str]:
        return labels_of(self.engine.loaded.config, request.plan.returned_columns or range(result.shape[-1]))

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: PoolingTask | Sequence[PoolingTask],
        params: PoolingParams | Sequence[PoolingParams] | None,
        arguments: PromptArguments,
    ) -> tuple[list[Request], list[torch.Tensor]]:
        options = _options(arguments)
        listed, _ = as_prompt_list(prompts)
        return self._submit(listed, task, params, options, arguments.get("use_tqdm", True))

    def _submit(
        self,
        prompts: Sequence[Any],
        task: PoolingTask | Sequence[PoolingTask],
        params: PoolingParams | Sequence[PoolingParams] | None,
        options: PromptOptions,
        use_tqdm: bool | Callable[..., tqdm[Any]],
    ) -> tuple[list[Request], list[torch.Tensor]]:
        requests = self.engine.prepare(prompts, task, params, options)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        bar = make_bar(total=len(requests), desc=_name_of(task), unit="prompt", disable=use_tqdm is False)
        try:
            self.engine.submit(requests)
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
        if not self.engine.is_left_behind:
            self.engine.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled or copied, since its memory and its thread are one process's: "
            "make an LLM in each process"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.close()


def _options(arguments: PromptArguments) -> PromptOptions:
    """The options among a call's arguments; an unknown one is an error that lists the known."""
    known = PromptArguments.__annotations__
    for name in arguments:
        if name not in known:
            hint = f"known: {', '.join(known)}"
            if name in {field.name for field in fields(PoolingParams)}:
                hint = f"give PoolingParams({name}=...)"
            raise TypeError(f"unexpected keyword argument {name!r}; {hint}")
    values: dict[str, Any] = {name: arguments.get(name) for name in ("truncate_prompt_tokens", "truncation_side")}
    further = arguments.get("tokenization_kwargs") or {}
    if not isinstance(further, Mapping):
        raise InvalidParameterError(
            f"tokenization_kwargs={further!r} is not a dictionary; known keys: {', '.join(values)}",
            param="tokenization_kwargs",
        )
    for key, value in further.items():
        if key not in values:
            raise InvalidParameterError(f"tokenization_kwargs has {key!r}; known: {', '.join(values)}", param=key)
        values[key] = value
    return PromptOptions(
        prompt_name=arguments.get("prompt_name"),
        prompt=arguments.get("prompt"),
        lora_request=arguments.get("lora_request"),
        **values,
    )


def _name_of(task: PoolingTask | Sequence[PoolingTask]) -> str:
    return task.value if isinstance(task, PoolingTask) else " + ".join(task)


def _of_side(
    params: PoolingParams | Sequence[PoolingParams] | None, is_query: bool | None
) -> PoolingParams | Sequence[PoolingParams] | None:
    """The parameters with the side that a call names; an error where they say the other."""
    if is_query is None:
        return params
    for one in params if isinstance(params, (list, tuple)) else [params]:
        if isinstance(one, PoolingParams) and one.is_query not in (None, is_query):
            raise InvalidParameterError(
                f"is_query={is_query} contradicts PoolingParams(is_query={one.is_query}): give one", param="is_query"
            )
    if isinstance(params, (list, tuple)):
        return [replace(one, is_query=is_query) if isinstance(one, PoolingParams) else one for one in params]
    if params is None or isinstance(params, PoolingParams):
        return replace(params or PoolingParams(), is_query=is_query)
    return params


def _common(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.token_ids,
        "num_cached_tokens": _num_cached_tokens(request),
        "num_truncated_tokens": request.num_truncated_tokens,
        "num_windows": _num_windows(request),
    }


def _num_cached_tokens(request: Request) -> int:
    return sum(one.num_cached_tokens for one in leaves([request]))


def _num_windows(request: Request) -> int:
    return len(request.parts) or 1

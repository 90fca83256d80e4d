"""A model that a server has: an engine under a name, by itself or with one of its adapters."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anypool.adapters.chat_templates import ConversationTemplate, conversation_template
from anypool.adapters.heads import labels_of
from anypool.adapters.template_limits import LONGEST_RENDER_S, at_most
from anypool.config import LoRARequest
from anypool.engine.async_engine import AsyncEngine
from anypool.engine.engine import Engine
from anypool.engine.images import decode_data_url
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import ImagePrompt
from anypool.engine.request import Request
from anypool.engine.spans import SpannedPrompt
from anypool.engine.tokenization import Tokenizer
from anypool.entrypoints.cli_info import describe
from anypool.entrypoints.serve.prompt_names import NamedPrompts
from anypool.entrypoints.serve.schemas.chat import ChatFields, Conversation, image_urls
from anypool.entrypoints.serve.schemas.common import CommonFields
from anypool.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask

if TYPE_CHECKING:
    from anypool.entrypoints.serve.adapters import ServedAdapters

logger = logging.getLogger(__name__)

# Characters of a text that is cut to what the model takes: this many, or so many per token where that is more.
_LONGEST_TEXT = 1_000_000
_CHARACTERS_PER_TOKEN = 250


class ServedModel:
    """A model as routes see it.

    Args:
        engine: What runs it.
        trusts_templates: Whether requests may bring chat templates.
        fetch_image: The bytes of an image on the web; None where none is fetched.

    Attributes:
        parent, lora: Of a model with an adapter, the model and the adapter.
        siblings: The adapters of all models of its server.
    """

    siblings: ServedAdapters  # set by `ServedModels`

    def __init__(
        self,
        engine: Engine,
        *,
        trusts_templates: bool = False,
        fetch_image: Callable[[str, str], bytes] | None = None,
    ) -> None:
        self.engine = engine
        self.async_engine = AsyncEngine(engine)
        self.trusts_templates = trusts_templates
        self.fetch_image = fetch_image
        self.image_input = engine.loaded.facts.image_input
        self.created = int(time.time())
        self.name = served_name(engine)
        recipe = engine.loaded.recipe
        self.prompts = NamedPrompts(recipe.prompts, has_sides=_has_sides(engine), has_tasks=bool(recipe.tasks))
        self.in_windows = engine.loaded.pooler_config.enable_chunked_processing
        self.parent: ServedModel | None = None
        self.lora: LoRARequest | None = None
        self._has_warned_of_ids = False

    def adapted(self, lora: LoRARequest) -> ServedModel:
        """The model as requests see it that name one of its adapters."""
        view = copy(self)
        vars(view).pop("card", None)  # it has the name
        view.name, view.parent, view.lora, view.created = lora.lora_name, self, lora, int(time.time())
        return view

    @cached_property
    def kind(self) -> str:
        """What it is first of all: embedding, reranker, classifier or reward."""
        loaded = self.engine.loaded
        scores = loaded.defaults.scores
        if loaded.head is not None and loaded.head.is_reward:
            return "reward"
        if PoolingTask.CLASSIFY in scores and scores[PoolingTask.CLASSIFY].columns == 1:
            return "reranker" if self._scores_pairs else "reward"
        if PoolingTask.CLASSIFY in scores:
            return "classifier"
        if PoolingTask.TOKEN_CLASSIFY in scores:
            return "classifier"
        return "reward" if PoolingTask.REWARD in scores else "embedding"

    @property
    def gives_sparse_vectors(self) -> bool:
        return self.engine.loaded.defaults.sparse is not None

    @property
    def _scores_pairs(self) -> bool:
        """Whether its one score is about a pair: of causal models, only those whose files say so, or have a template.

        Reward models such as Skywork's are saved like a reranker without either.
        """
        loaded = self.engine.loaded
        return loaded.facts.is_encoder or loaded.recipe.is_cross_encoder or loaded.rerank_template is not None

    @property
    def source(self) -> str:
        """What was loaded: its name on the hub. A path is nobody's business, and of a folder it is the served name."""
        model = self.engine.config.model if self.lora is None else self.lora.lora_path
        return self.name if Path(model).expanduser().exists() else model

    @property
    def paths(self) -> set[str]:
        """Where it lies on this machine, in the forms that a message might have."""
        model = self.engine.config.model if self.lora is None else self.lora.lora_path
        path = os.path.expanduser(model)
        if not os.path.exists(path):
            return set()
        # A single word may stand in a message for something else.
        given = {one for one in (model, path) if os.sep in one.strip(os.sep)}
        return given | {os.path.abspath(path), os.path.realpath(path)}

    @cached_property
    def card(self) -> dict[str, Any]:
        """All that is known about it. No path of this machine is."""
        return {**describe(self.engine), "model": self.name}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, or an `InvalidPromptError` where there is none."""
        if self.engine.tokenizer is None:
            raise InvalidPromptError(f"{self.name} was loaded without a tokenizer: give token ids")
        return self.engine.tokenizer

    def prompt_options(self, asked: CommonFields) -> PromptOptions:
        """How the inputs of a body become token ids, and which adapter they are run with.

        Raises:
            InvalidParameterError: Two fields contradict each other, or there is no such prompt.
        """
        options = asked.prompt_options(self.prompts, in_windows=self.in_windows)
        # By its name: an adapter that was unloaded meanwhile is not read again.
        return options if self.lora is None else replace(options, lora_request=self.lora.lora_name)

    def prepare(
        self, prompts: Sequence[Any], task: PoolingTask | Sequence[PoolingTask], asked: ChatFields
    ) -> list[Request]:
        """Requests for what a body asks for: for prompts, or for its conversations where it has some."""
        options = self.prompt_options(asked)
        if asked.messages is not None:
            if options.prompt is not None or options.prompt_name is not None:
                raise InvalidParameterError(
                    "messages hold their own instructions: leave the prompt out", param="prompt"
                )
            prompts = self.render(asked)
            # Text that no template wrote has no special tokens yet.
            bare = asked.add_special_tokens is None and self.reads_bare_messages(asked)
            options = replace(
                _without_prompt(options, special_tokens=bare or options.special_tokens),
                is_rendered=not self.reads_bare_messages(asked),
            )
        return self.requests(prompts, task, self.params(asked, task), options)

    def params(self, asked: CommonFields, task: PoolingTask | Sequence[PoolingTask]) -> PoolingParams:
        """What a body asks of the results; for token vectors of a multi-vector model also on which side its inputs are.

        Raises:
            InvalidParameterError: Its fields contradict each other.
        """
        params = asked.pooling_params
        defaults = self.engine.loaded.defaults
        takes_sides = {
            PoolingTask.TOKEN_EMBED: defaults.token_vectors is not None,
            PoolingTask.SPARSE_EMBED: defaults.sparse is not None,
            PoolingTask.EMBED: defaults.sides is not None,
        }
        if not isinstance(task, PoolingTask) or not self.prompts.has_sides or not takes_sides.get(task, False):
            return params
        is_query = self.prompts.is_query(input_type=asked.input_type, task=asked.asked_use)
        if is_query is None:
            return params
        if params.is_query is not None and params.is_query != is_query:
            raise InvalidParameterError(f"is_query={params.is_query} contradicts input_type or task", param="is_query")
        return replace(params, is_query=is_query)

    def requests(
        self,
        prompts: Sequence[Any],
        task: PoolingTask | Sequence[PoolingTask],
        params: PoolingParams,
        options: PromptOptions,
    ) -> list[Request]:
        """Requests for prompts. Texts that would take seconds only to be cut are refused, as endless ones are.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served.
        """
        for index, prompt in enumerate(prompts):
            self.check_length(prompt.prompt if isinstance(prompt, SpannedPrompt) else prompt, index)
        if prompts and isinstance(prompts[0], list):
            self._look_at_ids(prompts[0])
        return self.engine.prepare(prompts, task, params, options)

    def _look_at_ids(self, ids: list[int]) -> None:
        """Warns once of ids that the model's tokenizer would not give: they may be of another one."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or self._has_warned_of_ids:
            return
        before, after = tokenizer.prefix_ids, tokenizer.suffix_ids
        if ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            self._has_warned_of_ids = True
            logger.warning(
                "%s: a request has token ids without the special tokens of the model's tokenizer. If they are of "
                "another tokenizer, as LangChain sends by default, their results mean nothing: send texts "
                "(check_embedding_ctx_length=False)",
                self.name,
            )

    def check_length(self, prompt: object, index: int) -> None:
        """Refuses a text that is endless; windows, which run the whole of a text, have a limit of their own."""
        longest = max(_LONGEST_TEXT, _CHARACTERS_PER_TOKEN * self.engine.max_model_len)
        if isinstance(prompt, str) and len(prompt) > longest and not self.in_windows:
            raise PromptTooLongError(
                f"input {index} has {len(prompt):,} characters, and this server cuts texts of at most {longest:,}"
            )

    def render(self, asked: ChatFields) -> list[str | ImagePrompt]:
        """The texts of a body's conversations, with their images where they have some.

        Raises:
            InvalidRequestError: There is no template for them, or it is the request's and may not be used; or an image
                cannot be had.
        """
        conversations = asked.messages or []
        urls = [image_urls(conversation) for conversation in conversations]
        if self.image_input is None and any(urls):
            raise InvalidPromptError(f"messages has an image, and {self.name} reads text alone", param="messages")
        if self.reads_bare_messages(asked):
            texts = [bare_text(conversation, self.name) for conversation in conversations]
        else:
            template = self._template(asked)
            with at_most(LONGEST_RENDER_S) if asked.chat_template is not None else nullcontext():
                texts = self._rendered(asked, template)
        return [self._with_images(*one) for one in zip(texts, urls, strict=True)]

    def _rendered(self, asked: ChatFields, template: ConversationTemplate) -> list[str]:
        return [
            template.render(
                [{**message, "content": _without_urls(message["content"])} for message in conversation],
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=asked.chat_template_kwargs,
            )
            for conversation in asked.messages or ()
        ]

    def with_images(self, content: str | list[dict[str, str]]) -> str | ImagePrompt:
        """What is scored: a text as it is, or the images among a message's parts with its text."""
        if isinstance(content, str):
            return content
        text = "".join(part.get("text", "") for part in content)
        return self._with_images(text, image_urls([{"content": content}]))

    def _with_images(self, text: str, urls: Sequence[str]) -> str | ImagePrompt:
        images = tuple(self._image(url, f"image {number}") for number, url in enumerate(urls))
        return ImagePrompt(images, text or None) if images else text

    def reads_bare_messages(self, asked: ChatFields) -> bool:
        """Whether the content of a conversation's one message is the prompt: of models of images without a template."""
        return (
            self.image_input is not None
            and asked.chat_template is None
            and (self.image_input != "inline" or self._own_template is None)
        )

    def _image(self, url: str, where: str) -> bytes:
        if url.startswith("data:"):
            return decode_data_url(url, where)
        if self.fetch_image is None:
            raise InvalidPromptError(
                f"{where} is a URL on the web, which this server does not fetch: send a data: URL, or start it with "
                "--allow-image-urls",
                param="messages",
            )
        return self.fetch_image(url, where)

    def _template(self, asked: ChatFields) -> ConversationTemplate:
        brought = asked.chat_template is not None or "chat_template" in (asked.chat_template_kwargs or {})
        if brought:
            refuse_template(trusted=self.trusts_templates)
        if asked.chat_template is not None:
            template = conversation_template(self._repository, self.tokenizer.named_tokens, asked.chat_template)
        else:
            template = self._own_template
        if template is None:
            raise InvalidParameterError(
                f"{self.name} has no chat template, so it takes no messages: send input", param="messages"
            )
        return template

    @cached_property
    def _own_template(self) -> ConversationTemplate | None:
        return conversation_template(self._repository, self.tokenizer.named_tokens)

    @property
    def _repository(self) -> Any:
        loaded = self.engine.loaded
        return loaded.repository.subfolder(loaded.recipe.backbone)

    def labels(self, request: Request, columns: int) -> Mapping[int, str]:
        """Names of the columns of a request's result."""
        return labels_of(self.engine.loaded.config, request.plan.returned_columns or range(columns))


def _has_sides(engine: Engine) -> bool:
    """Whether queries and documents are read each in their way."""
    return engine.loaded.multi_vector is not None or engine.loaded.recipe.router is not None


def bare_text(conversation: Conversation, name: str) -> str:
    """The text of a conversation of one message.

    Raises:
        InvalidPromptError: There are several, and no template that joins them.
    """
    if len(conversation) != 1 or conversation[0]["role"] != "user":
        raise InvalidPromptError(f"{name} has no chat template: send one message, of the role user", param="messages")
    content = conversation[0]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_urls(content: Any) -> Any:
    """Parts as a chat template sees them: it writes a placeholder for an image, whatever it is."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def refuse_template(*, trusted: bool) -> None:
    """Refuses a chat template that comes with a request, unless the server takes them."""
    if not trusted:
        raise InvalidParameterError(
            "chat templates in requests are not taken: start the server with --trust-request-chat-template",
            param="chat_template",
        )


def _without_prompt(options: PromptOptions, *, special_tokens: bool) -> PromptOptions:
    return replace(options, prompt_name=None, prompt="", special_tokens=special_tokens)


def served_name(engine: Engine) -> str:
    """The name under which a model is served: the one given, else the folder's, else the hub id."""
    name, model = engine.config.served_model_name, engine.config.model
    if name is not None and name != model:
        return name
    path = Path(os.path.abspath(Path(model).expanduser()))  # a link keeps its own name
    if path.is_dir():
        return path.name
    return path.stem if path.is_file() else model

"""Rerankers are prompt programs: the template of a known one is found by its configuration, and data, not code.

A manifest lists the pieces of the prompt, each tokenised by itself, and the tokens whose LM-head rows give the score.
A long document is cut; nothing else ever is. Any other template is a Jinja template over messages with the roles
`query` and `document`, as vLLM and sentence-transformers have them: the user's own, or the checkpoint's.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from anypool.adapters.template_limits import refuse_endless
from anypool.errors import CheckpointFormatError, ConfigError, MissingDependencyError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.repository import Repository

_FIELDS = re.compile(r"\{(instruction|query|document)\}")
# Stand for the texts while a template is rendered, to find what comes of them.
_QUERY_MARK, _MARK = "\ue000query\ue000", "\ue000document\ue000"
# A template with one of these reads content as a list of parts.
_PARTS = re.compile(r"content\[|\.type\b|['\"]type['\"]")


@dataclass(frozen=True, kw_only=True)
class TemplatedPrompt:
    """A prompt in pieces.

    Attributes:
        pieces: Texts, each tokenised by itself and joined.
        cut: The piece that holds the document, which is shortened when the whole is too long.
        document: Where the document stands in that piece: start and end in characters.
        special_tokens: Whether the tokenizer's own special tokens stand around the whole.
    """

    pieces: tuple[str, ...]
    cut: int
    document: tuple[int, int]
    special_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A known reranker.

    Attributes:
        name: For messages.
        architectures: What its config.json may name.
        model_name: Regular expression found in the names of its checkpoints, in lower case.
        false_token, true_token: Tokens whose LM-head rows give the score; the second alone where the first is None.
        pieces: Of the prompt, with `{instruction}`, `{query}` and `{document}`.
        special_tokens: Whether the tokenizer's own special tokens stand around the whole.
        instruction: The default one; "" for none.
        instruction_format: What stands in the prompt for an instruction.
        activation: What its authors apply to the score.
    """

    name: str
    architectures: tuple[str, ...]
    model_name: str
    false_token: str | None
    true_token: str
    pieces: tuple[str, ...]
    special_tokens: bool
    instruction: str
    instruction_format: str
    activation: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that it answers with: false and true, or true alone."""
        return tuple(token for token in (self.false_token, self.true_token) if token is not None)

    def render(self, query: str, document: str, instruction: str | None = None) -> TemplatedPrompt:
        """The prompt of one pair."""
        asked = instruction or self.instruction
        values = {
            "query": query,
            "document": document,
            "instruction": self.instruction_format.replace("{instruction}", asked) if asked else "",
        }

        def fill(text: str) -> str:
            return _FIELDS.sub(lambda match: values[match[1]], text)

        cut = next(i for i, piece in enumerate(self.pieces) if "{document}" in piece)
        start = len(fill(self.pieces[cut].partition("{document}")[0]))
        return TemplatedPrompt(
            pieces=tuple(map(fill, self.pieces)),
            cut=cut,
            document=(start, start + len(document)),
            special_tokens=self.special_tokens,
        )


class ChatTemplate:
    """A Jinja template over messages with the roles `query` and `document`, and `system` for an instruction.

    It sees the variable `instruction` too, where there is one.

    Args:
        text: The template, or the name of a file that holds it.
        in_parts: Whether the content of a message is a list of parts rather than a text; None to see it from the
            template.
        special_tokens: Whether the tokenizer's own special tokens stand around the prompt, where it does not have
            them already.
        variables: Further variables that it sees.
    """

    def __init__(
        self,
        text: str,
        *,
        in_parts: bool | None = None,
        special_tokens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        source = _source(text)
        try:
            self._template = template_environment().from_string(source)
        except template_error() as error:
            raise ConfigError(f"chat_template is not a valid Jinja template: {error}") from error
        self._in_parts = bool(_PARTS.search(source)) if in_parts is None else in_parts
        self._special_tokens = special_tokens
        self._variables = {"add_generation_prompt": False, "tools": None, "documents": None, **(variables or {})}
        self._is_checked = False

    def bind(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template with further variables, such as the tokenizer's `bos_token`; its own win."""
        bound = copy.copy(self)
        bound._variables = {**variables, **self._variables}
        return bound

    def render(self, query: str, document: str, instruction: str | None = None) -> TemplatedPrompt:
        """The prompt of one pair, as one piece.

        Raises:
            ConfigError: The template cannot be rendered, or does not hold the query and the document, that one once.
        """
        self._check(instruction)
        mark = _MARK
        while mark in query or mark in (instruction or ""):
            mark += _MARK
        before, _, after = self._render(query, mark, instruction).partition(mark)
        text = self._render(query, document, instruction)
        end = len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and end >= len(before)):
            before, end = text, len(text)  # it writes something else around this document: nothing can be cut
        return TemplatedPrompt(pieces=(text,), cut=0, document=(len(before), end), special_tokens=self._special_tokens)

    def _check(self, instruction: str | None) -> None:
        if self._is_checked:
            return
        text = self._render(_QUERY_MARK, _MARK, instruction)
        if text.count(_MARK) != 1:
            raise ConfigError(f"chat_template has the document {text.count(_MARK)} times; it must have it once")
        if _QUERY_MARK not in text:
            raise ConfigError("chat_template loses the query: it must have the content of the message of role 'query'")
        self._is_checked = True

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        contents = {"system": instruction, "query": query, "document": document}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._in_parts else text}
            for role, text in contents.items()
            if text is not None
        ]
        variables = self._variables if instruction is None else {**self._variables, "instruction": instruction}
        try:
            return str(self._template.render(messages=messages, **variables))
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(f"chat_template cannot be rendered: {error}") from error


RerankTemplate = Manifest | ChatTemplate


def _source(text: str) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"chat_template={text!r} is not a text")
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={text!r} is neither a Jinja template nor a file that can be read") from error


@cache
def template_environment() -> Any:
    """The environment that transformers gives to chat templates."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("chat templates need jinja2: pip install 'anypool[templates]'") from error

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            refuse_endless(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    return environment


def template_error() -> type[Exception]:
    from jinja2 import TemplateError

    return TemplateError


def _raise(message: str) -> None:
    raise ValueError(message)


def own_template(
    repository: Repository, *, in_parts: bool | None = None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The checkpoint's own chat template; None where it has none.

    Args:
        repository: The folder with the tokenizer's files.
        in_parts: As for `ChatTemplate`.
        variables: As for `ChatTemplate`.
    """
    text = read_template(repository)
    if text is None:
        return None
    return ChatTemplate(text, in_parts=in_parts, special_tokens=False, variables=variables)


def read_template(repository: Repository) -> str | None:
    """The text of the checkpoint's chat template: chat_template.jinja, else what one of two JSON files has."""
    path = repository.folder / "chat_template.jinja"
    if repository.gguf is None and path.is_file():
        return path.read_text(encoding="utf-8")
    in_json = ("chat_template.json", "tokenizer_config.json")  # the first is older processors'
    found = ((repository.read_object(name) or {}).get("chat_template") for name in in_json)
    given = next((one for one in found if one is not None), None)
    if isinstance(given, list):  # several by name
        given = next((one.get("template") for one in given if one.get("name") == "default"), None)
    if given is not None and not isinstance(given, str):
        raise CheckpointFormatError(f"{repository.name}: tokenizer_config.json has chat_template {given!r}, not a text")
    return given


def names_both_roles(template: str) -> bool:
    """Whether a chat template is made for pairs: it names the roles rather than passing on whatever role there is."""
    return all(re.search(rf"['\"]{role}['\"]", template) for role in ("query", "document"))


@cache
def manifests() -> tuple[Manifest, ...]:
    """The known rerankers."""
    folder = files("anypool.adapters") / "manifests"
    found = sorted((path for path in folder.iterdir() if path.name.endswith(".json")), key=lambda path: path.name)
    return tuple(_manifest(json.loads(path.read_text(encoding="utf-8"))) for path in found)


def _manifest(data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        name=data["name"],
        architectures=tuple(data["architectures"]),
        model_name=data["model_name"],
        false_token=data["tokens"].get("false"),
        true_token=data["tokens"]["true"],
        pieces=tuple(data["pieces"]),
        special_tokens=data["special_tokens"],
        instruction=data["instruction"],
        instruction_format=data["instruction_format"],
        activation=data["activation"],
    )


def find_manifest(
    config: ModelConfig, *, answers: tuple[int, ...] = (), token_id: Callable[[str], int] | None = None
) -> Manifest | None:
    """The manifest of a known reranker: its architecture fits, and so do its name or the tokens it answers with.

    Args:
        config: The checkpoint's configuration.
        answers: Ids of the tokens that its sentence-transformers files name: false and true, or true alone.
        token_id: The tokenizer's id of a token.
    """
    names = (config.name, str(config.raw.get("_name_or_path", "")))
    for manifest in manifests():
        if config.architecture not in manifest.architectures:
            continue
        by_name = any(re.search(manifest.model_name, name.lower()) for name in names)
        by_tokens = config.head.classifier_from_token == manifest.tokens
        if by_name or by_tokens or _has_ids(manifest, answers, token_id):
            return manifest
    return None


def _has_ids(manifest: Manifest, answers: tuple[int, ...], token_id: Callable[[str], int] | None) -> bool:
    if not answers or token_id is None:
        return False
    try:
        return tuple(map(token_id, manifest.tokens)) == answers
    except ConfigError:  # this tokenizer does not have them
        return False

"""Rerankers are prompt programs: the template of a known one is found by its configuration, and data, not code.

A manifest lists the pieces of the prompt, each tokenised by itself, and the tokens whose LM-head rows give the score.
A long document is cut; nothing else ever is. A template of the user's own is a Jinja template over messages with the
roles `query` and `document`, as vLLM has them, and the variable `instruction`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from anypool.errors import ConfigError, InvalidParameterError, MissingDependencyError
from anypool.model_executor.model_config import ModelConfig

_FIELDS = re.compile(r"\{(instruction|query|document)\}")
# Stands for the document while a template is rendered, to find what comes after it.
_MARK = "\ue000document\ue000"


@dataclass(frozen=True, kw_only=True)
class TemplatedPrompt:
    """A prompt in pieces.

    Attributes:
        pieces: Texts, each tokenised by itself and joined.
        cut: The piece that is shortened, on the right, when the whole is too long.
        kept_ending: How that piece must end all the same.
        special_tokens: Whether the tokenizer's own special tokens stand around the whole.
    """

    pieces: tuple[str, ...]
    cut: int
    kept_ending: str = ""
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
        instruction: The default one; None where the template has none.
        activation: What its authors apply to the score.
    """

    name: str
    architectures: tuple[str, ...]
    model_name: str
    false_token: str | None
    true_token: str
    pieces: tuple[str, ...]
    special_tokens: bool
    instruction: str | None
    activation: str

    def render(self, query: str, document: str, instruction: str | None = None) -> TemplatedPrompt:
        """The prompt of one pair.

        Raises:
            InvalidParameterError: An instruction is given and the template takes none.
        """
        if instruction is not None and self.instruction is None:
            raise InvalidParameterError(f"{self.name} takes no instruction", param="instruction")
        values = {"query": query, "document": document, "instruction": instruction or self.instruction or ""}
        pieces = tuple(_FIELDS.sub(lambda match: values[match[1]], piece) for piece in self.pieces)
        cut = next(i for i, piece in enumerate(self.pieces) if "{document}" in piece)
        return TemplatedPrompt(pieces=pieces, cut=cut, special_tokens=self.special_tokens)


class ChatTemplate:
    """A Jinja template over messages with the roles `query` and `document`.

    Args:
        text: The template, or the name of a file that holds it.
    """

    def __init__(self, text: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingDependencyError("chat templates need jinja2: pip install jinja2") from error
        is_name = "{" not in text and "\n" not in text
        if is_name and not Path(text).is_file():
            raise ConfigError(f"chat_template={text!r} is neither a Jinja template nor a file")
        source = Path(text).read_text(encoding="utf-8") if is_name else text
        self._error = TemplateError
        try:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"chat_template is not a valid Jinja template: {error}") from error

    def render(self, query: str, document: str, instruction: str | None = None) -> TemplatedPrompt:
        """The prompt of one pair, as one piece whose end after the document is kept."""
        marked = self._render(query, _MARK, instruction)
        if marked.count(_MARK) != 1:
            raise ConfigError(f"chat_template has the document {marked.count(_MARK)} times; it must have it once")
        return TemplatedPrompt(pieces=(marked.replace(_MARK, document),), cut=0, kept_ending=marked.partition(_MARK)[2])

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        try:
            return self._template.render(messages=messages, instruction=instruction, add_generation_prompt=True)
        except self._error as error:
            raise ConfigError(f"chat_template cannot be rendered: {error}") from error


RerankTemplate = Manifest | ChatTemplate


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
        activation=data["activation"],
    )


def find_manifest(config: ModelConfig) -> Manifest | None:
    """The manifest of a known reranker: its architecture fits, and so do its name or the tokens it answers with."""
    names = (config.name, str(config.raw.get("_name_or_path", "")))
    for manifest in manifests():
        if config.architecture not in manifest.architectures:
            continue
        tokens = tuple(token for token in (manifest.false_token, manifest.true_token) if token is not None)
        by_name = any(re.search(manifest.model_name, name.lower()) for name in names)
        if by_name or config.head.is_original_qwen3_reranker or config.head.classifier_from_token == tokens:
            return manifest
    return None

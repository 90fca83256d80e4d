"""The words that colpali-engine puts around queries and pages, which its versions do not agree about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from anypool.adapters.processors import load_processor
from anypool.errors import ConfigError, UnsupportedArchitectureError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.repository import Repository

VERSION_KEY = "colpali_engine"


class Wording(NamedTuple):
    """What a version of colpali-engine writes.

    Attributes:
        query: Before a query; ten of the augmentation token are behind it.
        after: Behind those.
    """

    query: str
    after: str = ""


class _Kind(NamedTuple):
    """A processor class of colpali-engine.

    Attributes:
        processor: The class of transformers that it is made of.
        page: The prompt of an image.
        augmentation: The token behind queries; None for the padding token.
        first: The oldest version whose words are known.
        after: Behind queries until 0.3.10.
    """

    processor: str
    page: str
    augmentation: str | None
    first: tuple[int, ...] = (0, 3, 4)
    after: str = ""


_QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_IDEFICS_PAGE = "<|im_start|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_KINDS = {
    "ColIdefics3": _Kind("Idefics3Processor", _IDEFICS_PAGE, "<end_of_utterance>", first=(0, 3, 11)),
    "ColPali": _Kind("PaliGemmaProcessor", "<image><bos>Describe the image.", None, after="\n"),
    "ColQwen2": _Kind("Qwen2VLProcessor", _QWEN_PAGE, "<|endoftext|>"),
    "ColQwen2_5": _Kind("Qwen2VLProcessor", _QWEN_PAGE, "<|endoftext|>"),
}


def find_wording(config: ModelConfig) -> Wording | None:
    """How the version of colpali-engine that `colpali_engine` in config.json or `hf_overrides` names writes queries.

    Returns:
        None where the checkpoint is no class of colpali-engine.

    Raises:
        ConfigError: None is named, or one whose words are not known.
    """
    kind = _KINDS.get(config.architecture)
    if kind is None:
        return None
    version = config.raw.get(VERSION_KEY)
    if version is None:
        raise ConfigError(
            f"{config.name}: colpali-engine writes 'Query: ' before a query until 0.3.12, and nothing since 0.3.13, "
            f"and the checkpoint does not say which it is for: pass hf_overrides={{'{VERSION_KEY}': '0.3.13'}} to get "
            "what colpali-engine gives today, or the version that it was trained with"
        )
    if not isinstance(version, str) or re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        raise ConfigError(f"{VERSION_KEY}={version!r} is not a version of colpali-engine, such as '0.3.13'")
    number = tuple(int(part) for part in version.split("."))
    if number < kind.first:
        oldest = ".".join(map(str, kind.first))
        raise ConfigError(f"{VERSION_KEY}={version!r}: the words of {config.architecture} are known from {oldest} on")
    if number >= (0, 3, 13):
        return Wording("")
    return Wording("Query: ", "" if number >= (0, 3, 11) else kind.after)


class PageProcessor:
    """Queries and pages as colpali-engine prepares them, with the methods that transformers' own have.

    Args:
        repository: Where the processor's files are.
        architecture: The class of colpali-engine.
        wording: What its version writes.
    """

    def __init__(self, repository: Repository, architecture: str, wording: Wording) -> None:
        self._kind, self._wording = _KINDS[architecture], wording
        self._processor = load_processor(repository, cls=self._kind.processor)
        self.tokenizer, self.image_processor = self._processor.tokenizer, self._processor.image_processor
        if self._kind.augmentation is None:
            self._start, augmentation = self.tokenizer.bos_token, self.tokenizer.pad_token
        else:
            self._start, augmentation = "", self._kind.augmentation
        self._suffix = augmentation * 10 + wording.after

    def process_queries(self, text: Sequence[str], *, return_tensors: str) -> Any:
        written = [self._start + self._wording.query + one + self._suffix for one in text]
        return self.tokenizer(written, return_tensors=return_tensors, padding="longest")

    def process_images(self, images: Sequence[Any], *, return_tensors: str) -> Any:
        prompts = [self._kind.page] * len(images)
        batch = self._processor(text=prompts, images=[[one] for one in images], return_tensors=return_tensors)
        if "image_grid_thw" in batch:
            batch["pixel_values"] = batch["pixel_values"].unsqueeze(0)
        return batch


def with_base(repository: Repository, *, cache_dir: str | None) -> Repository:
    """An adapter for page retrieval beside its base, which is fetched where it is a hub id; any other as it is."""
    adapter = repository.read_object("adapter_config.json")
    trained = f"{(adapter or {}).get('target_modules')} {(adapter or {}).get('modules_to_save')}"
    base = (adapter or {}).get("base_model_name_or_path")
    if not isinstance(base, str) or re.search(r"(?<![\w-])(custom_text_proj|linear)\b", trained) is None:
        return repository
    opened = Repository.open(base, revision=(adapter or {}).get("revision"), cache_dir=cache_dir)
    names = opened.read_config().get("architectures") or [None]
    if names[0] not in _KINDS:
        raise UnsupportedArchitectureError(
            f"{repository.name} is an adapter of {base}, which is {names[0]} and not one of {', '.join(_KINDS)}: its "
            "last layer is not in it, and would be random"
        )
    return replace(repository, base=opened)

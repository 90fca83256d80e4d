"""The forms in which a prompt may be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Union

from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.engine.images import as_image_list
from anypool.errors import InvalidPromptError

Prompt = Union[str, "list[int]", Mapping[str, Any]]

_BYTES = (bytes, bytearray, memoryview)
_FORMS = (
    "a text, a list of token ids, {'prompt': text}, {'prompt': text, 'text_pair': text}, {'prompt_token_ids': [...]}, "
    "or {'multi_modal_data': {'image': ...}} with or without a 'prompt'"
)


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """One prompt or several -> a list, and whether a single one was given. A flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        for name in ("tolist", "to_pylist", "to_list"):  # numpy, pandas, torch; pyarrow; polars
            if hasattr(prompts, name) and not isinstance(prompts, _BYTES):
                return as_prompt_list(getattr(prompts, name)())
        if isinstance(prompts, (Iterator, ValuesView)):  # generators, map(), dict.values(): they have an order
            return as_prompt_list(list(prompts))
        raise InvalidPromptError(
            f"prompts of type {type(prompts).__name__} are not understood; give {_FORMS}, or a list"
        )
    if prompts and all(_is_token(item) for item in prompts):
        return [list(prompts)], True  # type: ignore[arg-type]
    return list(prompts), False  # type: ignore[arg-type]


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class TextPair:
    """Two texts that a classifier of pairs reads together."""

    first: str
    second: str


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Images, and a text where there is one. The text may say where each image stands, by the model's placeholder.

    Attributes:
        images: As they are given; `engine/images.py` opens them.
        text: None where there is none.
    """

    images: tuple[Any, ...]
    text: str | None = None


def check_prompt(
    prompt: Prompt | TextPair | TemplatedPrompt | ImagePrompt, index: int
) -> str | list[int] | TextPair | TemplatedPrompt | ImagePrompt:
    """A prompt's text, token ids or images; a pair and a templated prompt are returned as they are.

    Args:
        prompt: In any of its forms.
        index: Its place among the inputs, for messages.

    Raises:
        InvalidPromptError: It has none of the forms, or is text that is not valid Unicode.
    """
    if isinstance(prompt, TextPair):
        check_text(prompt.first, f"input {index}")
        check_text(prompt.second, f"input {index}")
        return prompt
    if isinstance(prompt, TemplatedPrompt):
        for piece in prompt.pieces:
            check_text(piece, f"input {index}")
        return prompt
    if isinstance(prompt, ImagePrompt):
        return prompt
    if isinstance(prompt, Mapping):
        if "multi_modal_data" in prompt:
            return as_image_prompt(prompt, f"input {index}")
        if set(prompt) == {"prompt", "text_pair"}:
            return _pair(prompt, index)
        if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
            raise InvalidPromptError(f"input {index} has the keys {sorted(map(str, prompt))}; give {_FORMS}")
        key, value = next(iter(prompt.items()))
        if isinstance(value, str) != (key == "prompt"):
            raise InvalidPromptError(f"input {index}: {key!r} holds a {type(value).__name__}; give {_FORMS}")
        prompt = value
    if isinstance(prompt, str):
        return check_text(prompt, f"input {index}")
    ids: Any = prompt
    if hasattr(prompt, "tolist") and not isinstance(prompt, _BYTES):  # a numpy array or a tensor of ids
        ids = prompt.tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, _BYTES):
        for token in ids:
            if isinstance(token, str):
                raise InvalidPromptError(
                    f"input {index} is a list of texts, where one prompt is expected; two texts that are read together "
                    "are {'prompt': first, 'text_pair': second} for classify(), or given to score(first, second)"
                )
            if not _is_token(token):
                raise InvalidPromptError(
                    f"input {index} is a list that holds {token!r} ({type(token).__name__}); token ids are integers"
                )
        if not ids:
            raise InvalidPromptError(f"input {index} is an empty list of token ids")
        return [int(token) for token in ids]
    raise InvalidPromptError(f"input {index} is {prompt!r} ({type(prompt).__name__}); give {_FORMS}")


def as_image_prompt(prompt: Mapping[str, Any], where: str) -> ImagePrompt:
    """A mapping with `multi_modal_data`, checked; its images are not opened yet.

    Raises:
        InvalidPromptError: It has other keys than these, or other data than images.
    """
    unknown = sorted(set(map(str, prompt)) - {"prompt", "multi_modal_data"})
    if unknown:
        raise InvalidPromptError(
            f"{where} has {', '.join(unknown)} beside multi_modal_data; give a 'prompt' with it, or nothing"
        )
    text, data = prompt.get("prompt"), prompt["multi_modal_data"]
    if text is not None and not isinstance(text, str):
        raise InvalidPromptError(f"{where}: 'prompt' holds a {type(text).__name__}; images stand beside text")
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        given = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidPromptError(f"{where}: multi_modal_data is {given}; give {{'image': ...}}, nothing else is read")
    if text is not None:
        check_text(text, where)
    return ImagePrompt(as_image_list(data["image"], f"{where}: multi_modal_data"), text)


def as_given(prompt: str | ImagePrompt) -> str | dict[str, Any]:
    """A text, or the mapping that an image prompt was made of."""
    if isinstance(prompt, str):
        return prompt
    text = {} if prompt.text is None else {"prompt": prompt.text}
    images = prompt.images[0] if len(prompt.images) == 1 else list(prompt.images)
    return {**text, "multi_modal_data": {"image": images}}


def _pair(prompt: Mapping[str, Any], index: int) -> TextPair:
    for key, text in prompt.items():
        if not isinstance(text, str):
            raise InvalidPromptError(f"input {index}: {key!r} holds a {type(text).__name__}; give {_FORMS}")
        check_text(text, f"input {index}: {key!r}")
    return TextPair(prompt["prompt"], prompt["text_pair"])


def check_text(text: str, what: str) -> str:
    """The text, or an `InvalidPromptError` about `what` where it cannot be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPromptError(
            f"{what} is not valid Unicode: it has the lone surrogate U+{ord(text[error.start]):04X} "
            f"at position {error.start}"
        ) from None
    return text

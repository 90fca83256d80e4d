"""Spans of a text that are embedded each: late chunking (Günther et al., arXiv:2409.04701)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from anypool.engine.prompts import Prompt, check_prompt
from anypool.errors import InvalidParameterError, UnsupportedTaskError
from anypool.pooling.methods import PoolingType

UNITS = ("characters", "tokens")

Span = tuple[int, int]


@dataclass(frozen=True)
class SpannedPrompt:
    """A prompt of which parts are embedded.

    Attributes:
        prompt: A text or token ids.
        spans: Start and end of each part, the end not included.
        in_tokens: Whether they count the tokens that are run, rather than the characters of the text.
    """

    prompt: str | list[int]
    spans: tuple[Span, ...]
    in_tokens: bool


def check_span_lists(spans: object, prompts: int) -> list[Any]:
    """The spans of each of several prompts, or an `InvalidParameterError` where there are not as many."""
    lists = _as_list(spans)
    if lists is None or len(lists) != prompts:
        raise InvalidParameterError(
            f"{prompts} prompts need a list of as many lists of spans, and spans is {spans!r:.80}", param="spans"
        )
    return lists


def check_spans(prompt: Prompt, spans: object, unit: str, index: int) -> SpannedPrompt:
    """A prompt with its spans.

    Args:
        prompt: In any of its forms.
        spans: Pairs of integers.
        unit: One of `UNITS`.
        index: The prompt's place among the inputs, for messages.

    Raises:
        InvalidPromptError: The prompt has none of the forms.
        InvalidParameterError: A span is no pair of a start and a later end, or the unit is none or does not fit.
    """
    if unit not in UNITS:
        raise InvalidParameterError(f"unit={unit!r} is neither 'characters' nor 'tokens'", param="unit")
    checked = check_prompt(prompt, index)
    assert isinstance(checked, (str, list))
    if unit == "characters" and not isinstance(checked, str):
        raise InvalidParameterError(f"input {index}: token ids have no characters: pass unit='tokens'", param="unit")
    pairs = _as_list(spans)
    if not pairs:
        raise _wrong(index, f"spans={spans!r} is not a list of pairs, start and end, at least one")
    return SpannedPrompt(checked, tuple(_check_span(pair, index) for pair in pairs), unit == "tokens")


def _as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
    return list(value) if is_list else None


def _check_span(span: object, index: int) -> Span:
    pair = _as_list(span)
    if pair is None or len(pair) != 2 or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in pair):
        raise _wrong(index, f"spans has {span!r}, which is not a pair of integers, start and end")
    start, end = map(int, pair)
    if not 0 <= start < end:
        raise _wrong(index, f"spans has {(start, end)}; a span starts at 0 or later and ends after its start")
    return start, end


def refuse_unless_mean(types: tuple[PoolingType, ...] | None, name: str) -> None:
    """Refuses spans of a model, of a name, whose embeddings are not the mean of their tokens' states.

    Raises:
        UnsupportedTaskError: Its pooling `types` are others, or it has a pooler of its own for embeddings.
    """
    if types != (PoolingType.MEAN,):
        pooling = "a pooler of its own" if types is None else "+".join(types)
        raise UnsupportedTaskError(
            f"a span's embedding is the mean of its tokens, and {name} pools by {pooling}: "
            "take a model that pools by MEAN, or pass pooler_config=PoolerConfig(pooling_type='MEAN')"
        )


def token_spans(prompt: SpannedPrompt, index: int, length: int, offsets: Sequence[Span] | None) -> tuple[Span, ...]:
    """The tokens of each span: the first, and the one after the last.

    Args:
        prompt: With its spans. Of one in characters, a token belongs to a span if they share a character.
        index: Its place among the inputs, for messages.
        length: How many tokens it has.
        offsets: Where they stand in the text, in characters; (0, 0) for special ones. None where it is token ids.

    Raises:
        InvalidParameterError: A span ends after the prompt, or covers no token.
    """
    most, what = (length, "tokens") if prompt.in_tokens else (len(prompt.prompt), "characters")
    for span in prompt.spans:
        if span[1] > most:
            raise _wrong(index, f"spans has {span}, and there are {most:,} {what}")
    if prompt.in_tokens:
        return prompt.spans
    assert offsets is not None
    places = [place for place, (start, end) in enumerate(offsets) if start < end]
    starts, ends = ([offsets[place][side] for place in places] for side in (0, 1))
    found = []
    for start, end in prompt.spans:
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        if first >= last:
            text = str(prompt.prompt)[start:end]
            raise _wrong(index, f"the span {(start, end)}, {text[:40]!r}, covers no token that is run")
        found.append((places[first], places[last - 1] + 1))
    return tuple(found)


def _wrong(index: int, message: str) -> InvalidParameterError:
    return InvalidParameterError(f"input {index}: {message}", param="spans")

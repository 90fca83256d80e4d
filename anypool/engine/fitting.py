"""Token ids that fit the model: cut, or put into windows, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anypool.adapters.load import LoadedModel
from anypool.adapters.multi_vector import MultiVector, Side
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import is_int, require
from anypool.engine.prompts import TextPair
from anypool.engine.tokenization import Tokenizer, keep, truncate
from anypool.engine.windows import Window, room_for_text, split, spread
from anypool.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError

# More characters than a text can have per token, on average, and still be a text.
_CHARACTERS_PER_TOKEN = 250


@dataclass(frozen=True)
class Fitted:
    """A prompt's ids after truncation.

    Attributes:
        ids: Special tokens included.
        truncated: How many were cut off.
        types: Segment ids of a text pair; None where all are 0.
        skip: Leading tokens that are not pooled, of the prompt or of each window.
        windows: What is run in its place, where it is longer than the model takes.
        num_keys: Leading tokens that are attended to; None for all.
    """

    ids: list[int]
    truncated: int = 0
    types: list[int] | None = None
    skip: int = 0
    windows: tuple[Window, ...] = ()
    num_keys: int | None = None


class Fitting:
    """Fits token ids to one loaded model.

    Args:
        loaded: The model.
        tokenizer: Its tokenizer; None where prompts are token ids only.
        max_model_len: Longest prompt in tokens that is run as one.

    Raises:
        ConfigError: What the user says about windows contradicts the model.
    """

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.loaded, self.tokenizer, self.max_model_len = loaded, tokenizer, max_model_len
        self.pooler_config = loaded.pooler_config
        self.in_windows = loaded.pooler_config.enable_chunked_processing
        if self.in_windows:
            self._check_windows()
        if loaded.multi_vector is not None:
            self._check_sides(loaded.multi_vector)

    @property
    def longest(self) -> int | None:
        """The longest prompt in tokens that is taken, in windows or not; None for any."""
        return self.pooler_config.max_embed_len if self.in_windows else self.max_model_len

    def limit(self, asked: int | None) -> int | None:
        """Where prompts are cut: `truncate_prompt_tokens`, of which -1 is the longest that is run as one.

        Raises:
            InvalidParameterError: It is no such number.
        """
        if asked is None:
            return None
        if not is_int(asked) or asked == 0 or asked < -1:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={asked!r} is neither a positive number nor -1 (the model's limit)",
                param="truncate_prompt_tokens",
            )
        if self.longest is not None and asked > self.longest:
            what = "max_embed_len" if self.in_windows else "the model takes"
            raise InvalidParameterError(
                f"truncate_prompt_tokens={asked} is more than {what}, {self.longest}", param="truncate_prompt_tokens"
            )
        return self.max_model_len if asked == -1 else asked

    def refuse_endless(self, prompts: Sequence[object]) -> None:
        """Refuses a text that no vocabulary could bring down to the limit, before minutes go into tokenising it."""
        if self.longest is None:
            return
        for index, prompt in enumerate(prompts):
            characters = sum(map(len, _texts_of(prompt)))
            if characters > _CHARACTERS_PER_TOKEN * self.longest:
                raise self._too_long(f"input {index} has {characters:,} characters, and the limit is", " tokens")

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer, or an `InvalidPromptError` where there is none."""
        if self.tokenizer is None:
            raise InvalidPromptError(
                f"{self.loaded.config.name} was loaded without a tokenizer: give token ids, or pass tokenizer="
            )
        return self.tokenizer

    def single(
        self,
        ids: list[int],
        index: int,
        limit: int | None,
        *,
        side: str,
        prefix: str,
        skip: int,
        around: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Fitted:
        """A text, or token ids.

        Args:
            ids: With special tokens.
            index: Place among the inputs, for messages.
            limit: Where it is cut; None where it is refused if it is too long.
            side: The end that is cut.
            prefix: The prompt that the text begins with.
            skip: How many leading tokens, of this prompt, are not pooled.
            around: Tokens before and after the text that are kept, in place of the tokenizer's special ones.
        """
        kept = ids
        if limit is None:
            self._check_length(index, len(ids))
        elif around is not None:
            kept = truncate(ids, limit, side=side, prefix=around[0], suffix=around[1])
        elif self.tokenizer is None:
            kept = truncate(ids, limit, side=side)
        else:
            tokenizer = self.tokenizer
            kept = truncate(ids, limit, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)
        fitted = Fitted(kept, len(ids) - len(kept), skip=skip)
        if len(kept) <= self.max_model_len:
            return fitted
        tokenizer = self.need_tokenizer()
        head = _common(kept, tokenizer.prompt_ids(prefix) if prefix else tokenizer.prefix_ids)
        tail = len(tokenizer.suffix_ids) if kept[len(kept) - len(tokenizer.suffix_ids) :] == tokenizer.suffix_ids else 0
        _, overlap = self._room(head + tail, index)
        windows = split(kept, head=head, tail=tail, size=self.max_model_len, overlap=overlap)
        return replace(fitted, skip=head if skip else 0, windows=tuple(windows))

    def one_side(self, which: Side, ids: list[int], index: int, asked: int | None, *, side: str) -> Fitted:
        """A query or document of a multi-vector model: cut where its checkpoint cuts it, marked, expanded.

        Args:
            which: How it is read.
            ids: With special tokens.
            index: Place among the inputs, for messages.
            asked: `truncate_prompt_tokens`.
            side: The end that is cut.
        """
        if not ids:
            return Fitted(ids)
        given = self.limit(asked)
        stated = which.limit(given if asked != -1 else None, self.max_model_len)
        limit = given if stated is None else stated
        marks = int(which.marker is not None)
        if limit is None:
            self._check_length(index, len(ids) + marks)
            kept = ids
        else:
            tokenizer = self.need_tokenizer()
            kept = truncate(ids, limit - marks, side=side, prefix=tokenizer.prefix_ids, suffix=tokenizer.suffix_ids)
        full, num_keys = which.expanded(which.marked(kept))
        return Fitted(full, len(ids) - len(kept), num_keys=num_keys)

    def pair(
        self, first: list[int], second: list[int], index: int, limit: int | None, *, side: str, skip: int
    ) -> Fitted:
        """Two texts with the tokenizer's own pair template: the longer is cut first, or the second is in windows."""
        tokenizer = self.need_tokenizer()
        if self.loaded.rerank_template is not None:
            raise InvalidPromptError(
                f"input {index} is a pair of texts, and {self.loaded.config.name} reads it in a template: call score()"
            )
        if self.in_windows and (limit is None or limit > self.max_model_len):
            *_, others = tokenizer.join_pair(first, [], None)
            if others + len(second) > self.max_model_len:
                return self._pair_in_windows(first, second, others, index, limit, side=side, skip=skip)
        ids, types, full = tokenizer.join_pair(first, second, limit, side=side)
        if limit is None:
            self._check_length(index, full)
        return Fitted(ids, full - len(ids), types=types if self._has_types else None, skip=skip)

    def _pair_in_windows(
        self, first: list[int], second: list[int], others: int, index: int, limit: int | None, *, side: str, skip: int
    ) -> Fitted:
        """A pair with `others` tokens beside the second text, which does not fit: that alone is cut and put in windows.

        The first stands in each window, so it is the query.
        """
        if limit is None:
            self._check_length(index, others + len(second))
        tokenizer = self.need_tokenizer()
        room, overlap = self._room(others, index)
        kept = second if limit is None else list(keep(second, min(len(second), limit - others), side))
        windows = []
        for start, end in spread(len(kept), room, overlap):
            ids, types, _ = tokenizer.join_pair(first, kept[start:end], None)
            windows.append(Window(ids, types if self._has_types else None))
        ids, *_ = tokenizer.join_pair(first, kept, None)
        return Fitted(ids, len(second) - len(kept), skip=skip, windows=tuple(windows))

    @property
    def _has_types(self) -> bool:
        return self.need_tokenizer().has_segments and self.loaded.config.type_vocab_size > 1

    def templated(
        self, prompt: TemplatedPrompt, pieces: Mapping[str, list[int]], index: int, limit: int | None, *, side: str
    ) -> Fitted:
        """Pieces tokenised one by one; where they are too long, the document is cut, or in windows, and nothing else.

        Args:
            prompt: The pieces.
            pieces: Ids of each.
            index: Place among the inputs, for messages.
            limit: Where the document is cut; None where it is refused if it is too long.
            side: Which end of it is cut.
        """
        parts = [pieces[piece] for piece in prompt.pieces]
        around = self._special_tokens_around(parts[0], parts[-1]) if prompt.special_tokens else ([], [])
        full = sum(map(len, (*around, *parts)))
        if limit is None:
            self._check_length(index, full)
        elif full > limit:
            cut = parts[prompt.cut]
            parts[prompt.cut] = self._cut_document(prompt, cut, full - len(cut), index, limit, side)
        before = [i for part in (around[0], *parts[: prompt.cut]) for i in part]
        after = [i for part in (*parts[prompt.cut + 1 :], around[1]) for i in part]
        ids = [*before, *parts[prompt.cut], *after]
        fitted = Fitted(ids, full - len(ids))
        if len(ids) <= self.max_model_len:
            return fitted
        bodies = self._document_windows(prompt, parts[prompt.cut], len(before) + len(after), index)
        return replace(fitted, windows=tuple(Window([*before, *body, *after]) for body in bodies))

    def _special_tokens_around(self, first: list[int], last: list[int]) -> tuple[list[int], list[int]]:
        """The tokenizer's special tokens before and after a prompt, unless it begins or ends with them already."""
        before, after = self.need_tokenizer().prefix_ids, self.need_tokenizer().suffix_ids
        has_before = first[: len(before)] == before
        has_after = last[len(last) - len(after) :] == after
        return [] if has_before else before, [] if has_after else after

    def _cut_document(
        self, prompt: TemplatedPrompt, whole: list[int], others: int, index: int, limit: int, side: str
    ) -> list[int]:
        """The part that holds the document, so short that it fits into the limit with `others` tokens beside it."""
        before, after = self.need_tokenizer().around(prompt.pieces[prompt.cut], *prompt.document)
        room = limit - others - len(after)
        if room < len(before):
            raise InvalidPromptError(
                f"input {index}: the template and the query alone have {others + len(before) + len(after):,} tokens, "
                f"the limit is {limit:,}: shorten the query",
                param="truncate_prompt_tokens",
            )
        if side == "left":
            kept = self.need_tokenizer().tokens_before(prompt.pieces[prompt.cut], prompt.document[0])
            return whole[:kept] + whole[len(whole) - (limit - others - kept) :]
        return whole[:room] + after

    def _document_windows(self, prompt: TemplatedPrompt, whole: list[int], others: int, index: int) -> list[list[int]]:
        """The part that holds the document, once per window, each of which has `others` tokens beside it."""
        before, after = self.need_tokenizer().around(prompt.pieces[prompt.cut], *prompt.document)
        # What stands beside the document may have become one token with its first or last character. The first is the
        # document's then, and the last window ends as the whole does.
        head, tail = _common(whole, before), len(after)
        document, ending = whole[head : len(whole) - tail], whole[len(whole) - tail :]
        room, overlap = self._room(others + head + tail, index)
        places = spread(len(document), room, overlap)
        ends = [after] * (len(places) - 1) + [ending]
        return [[*whole[:head], *document[start:stop], *end] for (start, stop), end in zip(places, ends, strict=True)]

    def _room(self, others: int, index: int) -> tuple[int, int]:
        return room_for_text(others, self.max_model_len, self.pooler_config.chunk_overlap, f"input {index}")

    def _check_length(self, index: int, tokens: int) -> None:
        if self.longest is not None and tokens > self.longest:
            raise self._too_long(f"input {index} has {tokens:,} tokens, the limit is")

    def _too_long(self, what: str, unit: str = "") -> PromptTooLongError:
        windows = f" (max_embed_len, in windows of {self.max_model_len:,})" if self.in_windows else ""
        return PromptTooLongError(
            f"{what} {self.longest:,}{unit}{windows}: pass truncate_prompt_tokens=-1, or split the text"
        )

    def _check_sides(self, multi_vector: MultiVector) -> None:
        require(
            not self.in_windows,
            f"PoolerConfig: enable_chunked_processing has no meaning for {self.loaded.config.name}, whose documents "
            "are cut where their checkpoint says; truncate_prompt_tokens takes longer ones",
        )
        expansion = multi_vector.queries.expansion
        require(
            expansion is None or expansion.length <= self.max_model_len,
            f"queries of {self.loaded.config.name} are expanded to {expansion and expansion.length} tokens, and "
            f"max_model_len={self.max_model_len} is less",
        )

    def _check_windows(self) -> None:
        size, longest, overlap = self.max_model_len, self.longest, self.pooler_config.chunk_overlap
        require(
            self.tokenizer is not None,
            f"PoolerConfig: enable_chunked_processing needs a tokenizer, and {self.loaded.config.name} was loaded "
            "without one: it knows the special tokens that each window has",
        )
        require(
            longest is None or longest >= size,
            f"PoolerConfig: max_embed_len={longest} is less than a window, {size}: set max_model_len to shorten it",
        )
        require(
            overlap is None or 2 * overlap <= size,
            f"PoolerConfig: chunk_overlap={overlap} is more than half of a window, {size}",
        )


def _texts_of(prompt: object) -> tuple[str, ...]:
    if isinstance(prompt, TextPair):
        return prompt.first, prompt.second
    if isinstance(prompt, TemplatedPrompt):
        return prompt.pieces
    return (prompt,) if isinstance(prompt, str) else ()


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many leading ids are the same."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))

"""Text -> token ids, in bulk.

tokenizer.json is loaded as it is, by the `tokenizers` library; its own truncation and padding are switched off, since
they are leftovers of whoever saved it. Truncation cuts the text between the special tokens that stand before and
after it, so a text always ends as the model expects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anypool.errors import CheckpointFormatError, ConfigError, InvalidPromptError
from anypool.model_executor.weights.repository import Repository

if TYPE_CHECKING:
    import tokenizers

# transformers writes 1e30 where a tokenizer has no limit.
_NO_LIMIT = 10**12
# An interrupt waits for a batch of the library to end.
_TEXTS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class _PairTemplate:
    """Special tokens of a pair.

    Attributes:
        ids, types: Of the special tokens alone.
        first, second: Before which of them each text stands.
        segments: Segment ids of the two texts.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]
    first: int
    second: int
    segments: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token in a text.

    Attributes:
        id: Its number in the vocabulary.
        text: How the vocabulary writes it.
        is_special: Whether it is one of the special tokens.
        start, stop: Where it stands in the text, in characters; both 0 for special tokens that are added.
    """

    id: int
    text: str
    is_special: bool
    start: int
    stop: int


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: The tokenizer of the `tokenizers` library.
        max_length: Longest input in tokens that its files state, or None.
        truncation_side: "right" or "left": which end of a text is cut.
        named_tokens: Texts of special tokens by name, such as `bos_token`, for chat templates.
        has_segments: Whether its models are given segment ids.
        padding_side: "right" or "left": where others pad, which says where a query is expanded.
        dropped_id: A token that is left out of every text, such as the unknown one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        max_length: int | None = None,
        truncation_side: str = "right",
        named_tokens: Mapping[str, str] | None = None,
        has_segments: bool = True,
        padding_side: str = "right",
        dropped_id: int | None = None,
    ) -> None:
        self._backend = backend
        self.max_length = max_length
        self.truncation_side = truncation_side
        self.named_tokens = named_tokens or {}
        self.has_segments = has_segments
        self.padding_side = padding_side
        self.dropped_id = dropped_id
        backend.no_truncation()
        backend.no_padding()
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.prefix_ids, self.suffix_ids = self._surroundings()

    @classmethod
    def load(cls, repository: Repository, *, do_lower_case: bool = False, trust_remote_code: bool = False) -> Tokenizer:
        """Loads the tokenizer of a checkpoint.

        Raises:
            CheckpointFormatError: There is none, or it cannot be read.
        """
        config = repository.read_object("tokenizer_config.json") or {}
        if repository.gguf is None and repository.exists("tokenizer.json"):
            backend = _read_backend(repository)
            _apply_settings(backend, config)
        else:
            backend = _through_transformers(repository, trust_remote_code)
        if do_lower_case:
            _lower_case(backend)
        limit = config.get("model_max_length")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 1):
            raise CheckpointFormatError(
                f"{repository.name}: tokenizer_config.json has model_max_length {limit!r}, not a number of tokens"
            )
        return cls(
            backend,
            max_length=int(limit) if limit is not None and limit < _NO_LIMIT else None,
            truncation_side=config.get("truncation_side", "right"),
            named_tokens=_named_tokens({**(repository.read_object("special_tokens_map.json") or {}), **config}),
            has_segments=_has_segments(config),
            padding_side=config.get("padding_side", "right"),
        )

    @classmethod
    def load_bare(cls, repository: Repository, *, drops_unknown: bool) -> Tokenizer:
        """Loads tokenizer.json alone, without the special tokens that it puts around a text.

        Args:
            repository: The folder with the file.
            drops_unknown: Whether unknown tokens are left out of texts.

        Raises:
            CheckpointFormatError: There is none, or it cannot be read.
        """
        backend = _read_backend(repository)
        backend.post_processor = None
        return cls(backend, dropped_id=_unknown_id(backend) if drops_unknown else None)

    def end_with(self, token: str) -> None:
        """Puts one more special token after each text; a text that is cut keeps it."""
        from tokenizers.processors import TemplateProcessing

        before, after = ([str(self._backend.id_to_token(i)) for i in ids] for ids in (self.prefix_ids, self.suffix_ids))
        around = [*before, *after, token]
        self._backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after, token],
            pair=[*before, "$A", "$B", *after, token],
            special_tokens=[(name, self.token_id(name)) for name in dict.fromkeys(around)],
        )
        self.prefix_ids, self.suffix_ids = self._surroundings()

    def encode(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, uncut, with the special tokens around it unless they are switched off."""
        encoded = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[start : start + _TEXTS_AT_ONCE])
            encodings = self._backend.encode_batch_fast(some, add_special_tokens=special_tokens)
            encoded += [encoding.ids for encoding in encodings]
        if self.dropped_id is None:
            return encoded
        return [[i for i in ids if i != self.dropped_id] for ids in encoded]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, text: str, *, special_tokens: bool = True) -> list[Token]:
        """The tokens of a text, each with its place in it."""
        encoding = self._backend.encode(text, add_special_tokens=special_tokens)
        return [
            Token(id=i, text=token, is_special=i in self.special_ids, start=start, stop=stop)
            for i, token, (start, stop) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
            if i != self.dropped_id
        ]

    def shorten(self, text: str, limit: int, *, side: str = "right") -> tuple[str, int]:
        """As much of a text as has `limit` tokens, without special ones, and how many tokens were cut off."""
        places = self._backend.encode(text, add_special_tokens=False).offsets
        if len(places) <= limit:
            return text, 0
        kept = text[: places[limit - 1][1]] if side == "right" else text[places[len(places) - limit][0] :]
        return kept, len(places) - limit

    def join_pair(
        self, first: Sequence[int], second: Sequence[int], limit: int | None, *, side: str = "right"
    ) -> tuple[list[int], list[int], int]:
        """Two texts as one prompt, in the tokenizer's pair template.

        Args:
            first: Token ids of the first text, without special tokens.
            second: Those of the second text.
            limit: Longest result; the longer text is cut, then both alike. None cuts nothing.
            side: "right" or "left": which end of the texts is cut.

        Returns:
            Token ids, segment ids, and how many ids there were before cutting.
        """
        template = self._pair_template
        full = len(template.ids) + len(first) + len(second)
        if limit is not None and full > limit:
            room = limit - len(template.ids)
            if room < 0:
                raise InvalidPromptError(
                    f"truncate_prompt_tokens={limit} leaves no room: the special tokens alone are {len(template.ids)}",
                    param="truncate_prompt_tokens",
                )
            keep_first, keep_second = longest_first(len(first), len(second), room)
            first, second = keep(first, keep_first, side), keep(second, keep_second, side)
        ids, types = list(template.ids), list(template.types)
        for text, place, segment in (
            (second, template.second, template.segments[1]),  # from the end, so that the places still hold
            (first, template.first, template.segments[0]),
        ):
            ids[place:place] = text
            types[place:place] = [segment] * len(text)
        return ids, types, full

    @cached_property
    def _pair_template(self) -> _PairTemplate:
        """What the tokenizer puts around and between two texts, read off a pair of one token each."""
        text, _ = self._probe()
        pair = self._backend.encode(text, text, add_special_tokens=True)
        of_first, of_second = ([i for i, n in enumerate(pair.sequence_ids) if n == side] for side in (0, 1))
        special = [i for i, side in enumerate(pair.sequence_ids) if side is None]
        return _PairTemplate(
            ids=tuple(pair.ids[i] for i in special),
            types=tuple(pair.type_ids[i] for i in special),
            first=sum(i < of_first[0] for i in special),
            second=sum(i < of_second[0] for i in special),
            segments=(pair.type_ids[of_first[0]], pair.type_ids[of_second[0]]),
        )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Start and end in characters of each token of a text; (0, 0) for the special tokens around it."""
        encoding = self._backend.encode(text, add_special_tokens=True)
        return [place for i, place in zip(encoding.ids, encoding.offsets, strict=True) if i != self.dropped_id]

    def tokens_before(self, text: str, position: int) -> int:
        """How many tokens of a text, which is given without special tokens, end at or before a character."""
        places = self._backend.encode(text, add_special_tokens=False).offsets
        return next((i for i, (_, stop) in enumerate(places) if stop > position), len(places))

    def around(self, text: str, start: int, end: int) -> tuple[list[int], list[int]]:
        """What stands around a part of a text, which is given without special tokens.

        Args:
            text: The text.
            start, end: Where the part stands, in characters.

        Returns:
            The ids before the part and those after it, as they are around a part of one digit.
        """
        short = self._backend.encode(f"{text[:start]}0{text[end:]}", add_special_tokens=False)
        before = next((i for i, (_, stop) in enumerate(short.offsets) if stop > start), len(short.ids))
        after = len(short.ids)
        while after > before and short.offsets[after - 1][0] > start:
            after -= 1
        return short.ids[:before], short.ids[after:]

    def find(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None where it has none."""
        known: int | None = self._backend.token_to_id(token)
        return known

    def token_id(self, token: str) -> int:
        """The id of a token written as the vocabulary has it, or as text that is one token.

        Raises:
            ConfigError: The text is no token, or more than one.
        """
        known = self.find(token)
        if known is not None:
            return known
        ids = self.encode([token], special_tokens=False)[0]
        if len(ids) != 1:
            raise ConfigError(f"{token!r} is not one token of this model's vocabulary: it is {len(ids)}, {ids}")
        return ids[0]

    def prompt_ids(self, prompt: str) -> list[int]:
        """The leading tokens of a text that a prompt takes: its own with special ones, without one at the end."""
        [ids] = self.encode([prompt])
        return ids[:-1] if ids and ids[-1] in self.special_ids else ids

    def prompt_length(self, prompt: str) -> int:
        """How many leading tokens of a text a prompt takes."""
        return len(self.prompt_ids(prompt))

    def _probe(self) -> tuple[str, list[int]]:
        """A text that has tokens, and their ids."""
        for text in ("a", "0", ".", "the"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            if ids:
                break
        return text, ids

    def _surroundings(self) -> tuple[list[int], list[int]]:
        probe, bare = self._probe()
        full = self._backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise CheckpointFormatError("the tokenizer's special tokens do not stand before and after the text")


def keep(ids: Sequence[int], count: int, side: str) -> Sequence[int]:
    """`count` of the ids, without those at the end that is cut."""
    return ids[:count] if side == "right" else ids[len(ids) - count :]


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of a pair are kept: the longer text loses first, as the `tokenizers` library has it."""
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)


def truncate(
    ids: list[int], limit: int, *, side: str, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> list[int]:
    """Cuts `ids` to `limit`, keeping the special tokens that stand before and after the text where they are there.

    Raises:
        InvalidPromptError: The special tokens alone are more than the limit.
    """
    if len(ids) <= limit:
        return ids
    return [ids[i] for i in kept_positions(ids, limit, side=side, prefix=prefix, suffix=suffix)]


def kept_positions(
    ids: list[int], limit: int, *, side: str, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> list[int]:
    """Which places of a prompt that is too long `truncate` keeps."""
    before = len(prefix) if prefix and ids[: len(prefix)] == list(prefix) else 0
    after = len(suffix) if suffix and ids[-len(suffix) :] == list(suffix) else 0
    room = limit - before - after
    if room < 0:
        raise InvalidPromptError(
            f"truncate_prompt_tokens={limit} leaves no room: the special tokens alone are {before + after}",
            param="truncate_prompt_tokens",
        )
    end = len(ids) - after
    body = range(before, before + room) if side == "right" else range(end - room, end)
    return [*range(before), *body, *range(end, len(ids))]


def _read_backend(repository: Repository) -> Any:
    """tokenizer.json as it is."""
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(repository.folder / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception for whatever it cannot parse
        raise CheckpointFormatError(f"{repository.name}: tokenizer.json cannot be read: {error}") from error


def _unknown_id(backend: Any) -> int | None:
    """The id of the unknown token; None where the vocabulary has none."""
    model = json.loads(backend.to_str())["model"]
    if "unk_id" in model:  # Unigram
        found: int | None = model["unk_id"]
        return found
    return None if model.get("unk_token") is None else backend.token_to_id(model["unk_token"])


# Classes that build their own normaliser or pre-tokeniser from tokenizer_config.json, whatever tokenizer.json says.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")


def _apply_settings(backend: Any, config: dict[str, Any]) -> None:
    """What tokenizer_config.json states outright about case, accents and the first space wins over tokenizer.json."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import ByteLevel

    if config.get("tokenizer_class", _GENERIC_CLASSES[0]) in _GENERIC_CLASSES:
        return
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    if isinstance(normalizer, BertNormalizer):
        for key, attribute in (
            ("do_lower_case", "lowercase"),
            ("strip_accents", "strip_accents"),
            ("tokenize_chinese_chars", "handle_chinese_chars"),
        ):
            if isinstance(config.get(key), bool):
                setattr(normalizer, attribute, config[key])
    if isinstance(pre_tokenizer, ByteLevel) and isinstance(config.get("add_prefix_space"), bool):
        pre_tokenizer.add_prefix_space = config["add_prefix_space"]


def _has_segments(config: Mapping[str, Any]) -> bool:
    """Whether a model's inputs are to have segment ids: as listed, else as the class has it that wrote the file."""
    listed = config.get("model_input_names")
    if listed is not None:
        return "token_type_ids" in listed
    return config.get("tokenizer_class") != "TokenizersBackend"  # of transformers 5, which gives none


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _lower_case(backend: Any) -> None:
    from tokenizers.normalizers import Lowercase, Sequence

    existing = backend.normalizer
    backend.normalizer = Sequence([Lowercase()] if existing is None else [Lowercase(), existing])


def _through_transformers(repository: Repository, trust_remote_code: bool) -> Any:
    """Older vocabulary files and GGUF files: transformers builds a fast tokenizer from them."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if repository.gguf is not None:  # the file says which kind it is; AutoTokenizer would read all of it to ask
            slow = PreTrainedTokenizerFast.from_pretrained(repository.folder, gguf_file=repository.gguf.name)
        else:
            slow = AutoTokenizer.from_pretrained(repository.folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointFormatError(
            f"{repository.name}: no tokenizer.json, and transformers cannot build a tokenizer from the other files: "
            f"{error}"
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointFormatError(
            f"{repository.name}: {type(slow).__name__} has no fast form; save one as tokenizer.json, "
            "or pass skip_tokenizer_init=True and give token ids"
        )
    return backend

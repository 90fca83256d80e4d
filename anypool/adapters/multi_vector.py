"""What is particular about a multi-vector checkpoint: how queries and documents become token ids and vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from anypool.errors import CheckpointFormatError
from anypool.pooling.methods import PoolingType
from anypool.pooling.multi_vector import KeptTokens, MultiVectorPooler
from anypool.pooling.plan import PoolingDefaults, TokenVectorDefaults
from anypool.pooling.pooler import EmbedPooler
from anypool.pooling.tasks import PoolingTask
from anypool.pooling.token_pooling import TokenPooling


class Vocabulary(Protocol):
    """A tokenizer, as far as it is asked about its tokens.

    Attributes:
        named_tokens: Texts of special tokens by name, such as `mask_token`.
        padding_side: "right" or "left".
    """

    named_tokens: Mapping[str, str]
    padding_side: str

    def find(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Tokens that make a query longer: they have vectors of their own, which may match what the query does not say.

    Attributes:
        length: Tokens of a query with them; longer ones get none.
        cuts: Whether longer queries are cut to it.
        attended: Whether the query's own tokens attend to them.
        token: Which token; None for the tokenizer's mask token, or its end of sequence.
    """

    length: int
    cuts: bool = True
    attended: bool = False
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class SideRecipe:
    """How a checkpoint says that queries, or documents, are read.

    Attributes:
        marker: A token that is put behind the first one of each text.
        length: Longest text in tokens, marker and special ones included; longer ones are cut.
        prompt_name: The prompt that stands before each text where the caller names none.
        expansion: What makes it longer.
        skiplist: Tokens that have no vector.
    """

    marker: str | None = None
    length: int | None = None
    prompt_name: str | None = None
    expansion: Expansion | None = None
    skiplist: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MultiVectorRecipe:
    """How a checkpoint's token vectors are made, as its files say.

    Attributes:
        library: Which wrote it: PyLate, Stanford ColBERT or sentence-transformers.
        queries, documents: How either is read.
        only_token_ids: The tokens of documents that have a vector; None for all.
        only_tokens: The same for queries and documents, as the vocabulary writes them; empty for all.
        unknown_is_skipped: Whether a word of the skiplist that is no token stands for the unknown token.
        modules: (type, path, config) of what follows the backbone, the closing Normalize left out.
        projection: Name of the tensor of the projection, where it lies among the backbone's.
        token_pooling: What is done to documents in the end.
        similarity: "maxsim"; "meanmaxsim", the same divided by the number of the query's vectors; or "listwise", where
            a text is a whole list: documents, each with one vector, and the query, with the last one.
    """

    library: str
    queries: SideRecipe
    documents: SideRecipe
    only_token_ids: tuple[int, ...] | None = None
    only_tokens: tuple[str, ...] = ()
    unknown_is_skipped: bool = False
    modules: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    projection: str | None = None
    token_pooling: TokenPooling | None = None
    similarity: str = "maxsim"

    @property
    def is_listwise(self) -> bool:
        """Whether all documents of a query are one text."""
        return self.similarity == "listwise"


@dataclass(frozen=True, kw_only=True)
class Side:
    """A `SideRecipe` in token ids.

    Attributes:
        marker, length, prompt_name: As there.
        expansion: As there, with the id of its token.
        expansion_id: This id.
        kept: Which tokens have a vector.
    """

    marker: int | None = None
    length: int | None = None
    prompt_name: str | None = None
    expansion: Expansion | None = None
    expansion_id: int = 0
    kept: KeptTokens = field(default_factory=KeptTokens)

    @property
    def stated_length(self) -> int | None:
        """Where the checkpoint cuts texts; None where it leaves that open."""
        return self.expansion.length if self.expansion is not None and self.expansion.cuts else self.length

    def limit(self, asked: int | None, most: int) -> int | None:
        """Where a text is cut, its marker included; None where the checkpoint leaves that open.

        Args:
            asked: A number of tokens that the caller gives in place of the checkpoint's.
            most: What the model takes.
        """
        if self.expansion is not None and self.expansion.cuts:
            return min(self.expansion.length, asked or most)
        if self.expansion is not None and asked is not None:
            return max(self.expansion.length, asked)
        return asked if asked is not None or self.length is None else min(self.length, most)

    def marked(self, ids: Sequence[int]) -> list[int]:
        """With the marker behind the first id, which is the special token that texts begin with."""
        return list(ids) if self.marker is None else [*ids[:1], self.marker, *ids[1:]]

    def expanded(self, ids: list[int]) -> tuple[list[int], int | None]:
        """With the expansion, and how many leading ids are attended to; None for all."""
        missing = 0 if self.expansion is None else self.expansion.length - len(ids)
        if self.expansion is None or missing <= 0:
            return ids, None
        return ids + [self.expansion_id] * missing, None if self.expansion.attended else len(ids)


@dataclass(frozen=True, kw_only=True)
class MultiVector:
    """A multi-vector checkpoint, resolved.

    Attributes:
        recipe: What its files say.
        queries, documents: How either is read.
    """

    recipe: MultiVectorRecipe
    queries: Side
    documents: Side

    @classmethod
    def resolve(cls, recipe: MultiVectorRecipe, vocabulary: Vocabulary | None, *, name: str) -> MultiVector:
        """Finds the ids of the tokens that a recipe names.

        Args:
            recipe: The recipe.
            vocabulary: The checkpoint's tokenizer.
            name: Of the model, for messages.

        Raises:
            CheckpointFormatError: There is no tokenizer, or a token that must be there is not.
        """
        if vocabulary is None:
            raise CheckpointFormatError(
                f"{name} marks and expands texts by tokens that only its tokenizer knows, and it was loaded without "
                "one: leave skip_tokenizer_init out, or pass tokenizer="
            )
        sides = (_side(one, recipe, vocabulary, name=name) for one in (recipe.queries, recipe.documents))
        queries, documents = sides
        return cls(recipe=recipe, queries=queries, documents=documents)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """Where the checkpoint cuts queries, and where documents; None where it leaves that open."""
        return self.queries.stated_length, self.documents.stated_length

    def side(self, *, is_query: bool) -> Side:
        return self.queries if is_query else self.documents


def serve_token_vectors(
    model: Any, multi_vector: MultiVector, head: nn.Module, *, types: tuple[PoolingType, ...]
) -> None:
    """Makes token vectors what a model serves: its states as such are nothing that it was trained for.

    Args:
        model: The pooling model.
        multi_vector: Of its checkpoint.
        head: Modules over its states.
        types: How a text's one vector is pooled where the user wants that as well; ALL where nobody does.

    Raises:
        CheckpointFormatError: Queries are expanded in a way that the backbone cannot run.
    """
    expansion = multi_vector.queries.expansion
    if expansion is not None and not expansion.attended and not getattr(model, "takes_fewer_keys", False):
        raise CheckpointFormatError(
            f"{type(model).__name__}: the checkpoint expands queries with tokens that are not attended to, which this "
            "backbone cannot leave out: take another that was trained from, or one whose expansion is attended to"
        )
    pooler = MultiVectorPooler(head, queries=multi_vector.queries.kept, documents=multi_vector.documents.kept)
    for task in model.pooler.tasks:
        model.pooler.remove(task)
    model.pooler.install(PoolingTask.TOKEN_EMBED, pooler)
    if PoolingType.ALL not in types:
        model.pooler.install(PoolingTask.EMBED, EmbedPooler(types))
    model.score_type = "late-interaction"


def token_vector_defaults(multi_vector: MultiVector, defaults: PoolingDefaults) -> TokenVectorDefaults:
    """What requests get from a checkpoint, whose size and normalisation stand in the defaults of its model."""
    return TokenVectorDefaults(
        size=defaults.size,
        normalize=defaults.normalize,
        dimensions=defaults.dimensions,
        pooling=multi_vector.recipe.token_pooling,
        variant="pylate" if multi_vector.recipe.library == "PyLate" else "sentence-transformers",
    )


def _side(recipe: SideRecipe, whole: MultiVectorRecipe, vocabulary: Vocabulary, *, name: str) -> Side:
    marker = None
    if recipe.marker:
        marker = vocabulary.find(recipe.marker)
        if marker is None:
            raise CheckpointFormatError(
                f"{name}: the marker {recipe.marker!r}, which {whole.library} puts into each text, is no token of its "
                "tokenizer: the checkpoint was saved without it; save model and tokenizer together"
            )
    expansion_id = 0
    if recipe.expansion is not None:
        expansion_id = _expansion_id(recipe.expansion, vocabulary, name=name)
        if vocabulary.padding_side != "right":
            raise CheckpointFormatError(
                f"{name}: tokenizer_config.json has padding_side {vocabulary.padding_side!r}, and a query is expanded "
                "at its end: only 'right' is supported"
            )
    unknown = vocabulary.find(vocabulary.named_tokens.get("unk_token", ""))
    found = {vocabulary.find(word) for word in recipe.skiplist}
    if None in found and whole.unknown_is_skipped:
        found.add(unknown)
    only = whole.only_token_ids if recipe is whole.documents else None
    if whole.only_tokens:
        ids = {token: vocabulary.find(token) for token in whole.only_tokens}
        only = tuple(i for i in ids.values() if i is not None)
        if len(only) < len(ids):
            missing = ", ".join(token for token, i in ids.items() if i is None)
            raise CheckpointFormatError(f"{name}: its tokenizer has no {missing}, whose vectors it is about")
    return Side(
        marker=marker,
        length=recipe.length,
        prompt_name=recipe.prompt_name,
        expansion=recipe.expansion,
        expansion_id=expansion_id,
        kept=KeptTokens(
            dropped=frozenset(i for i in found if i is not None), only=None if only is None else frozenset(only)
        ),
    )


def _expansion_id(expansion: Expansion, vocabulary: Vocabulary, *, name: str) -> int:
    named = vocabulary.named_tokens
    token = expansion.token or named.get("mask_token") or named.get("eos_token")
    found = None if token is None else vocabulary.find(token)
    if found is None:
        what = "names neither a mask token nor an end of sequence" if token is None else f"has no token {token!r}"
        raise CheckpointFormatError(f"{name} expands queries, and its tokenizer {what} to do it with")
    return found

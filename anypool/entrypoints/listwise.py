"""Scores of a listwise reranker: the documents of a query are one list, and a score is about its place in that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from anypool.adapters.listwise import DOCUMENT_LENGTH, QUERY_LENGTH, blocks, render
from anypool.engine.engine import Engine
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.request import Request
from anypool.engine.tokenization import Tokenizer
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.pooling.params import PoolingParams


@dataclass(frozen=True, kw_only=True)
class Block:
    """Documents of one query that share a prompt.

    Attributes:
        pairs: Their places among the pairs that are scored.
        prompt: What is run.
        cut: Tokens that were cut off its texts.
    """

    pairs: tuple[int, ...]
    prompt: str
    cut: int


def plan_lists(
    engine: Engine, left: Sequence[str], right: Sequence[str], options: PromptOptions, instruction: str | None
) -> list[list[Block]]:
    """The prompts of each query's documents, which are all that are paired with it, in their order.

    Args:
        engine: The engine.
        left, right: Queries and documents, pair by pair.
        options: Whether long texts are cut, and where; its prompt is the instruction.
        instruction: What is looked for, in words.

    Raises:
        InvalidRequestError: A text is too long and may not be cut, or an option has no meaning here.
    """
    limit = options.truncate_prompt_tokens
    if limit not in (None, -1):
        raise InvalidParameterError(
            f"truncate_prompt_tokens={limit}: {engine.loaded.config.name} reads several documents in a prompt; -1 cuts "
            f"documents to {DOCUMENT_LENGTH:,} tokens and queries to {QUERY_LENGTH}",
            param="truncate_prompt_tokens",
        )
    if instruction is not None and (options.prompt is not None or options.prompt_name is not None):
        raise InvalidParameterError(
            "in a list the prompt is the instruction: give instruction, prompt or prompt_name", param="instruction"
        )
    if instruction is None:
        instruction = engine.prompt_text(options) or None
    lists: dict[str, list[int]] = {}
    for index, query in enumerate(left):
        lists.setdefault(query, []).append(index)
    shorten = _Shortening(engine, options)
    return [
        list(_blocks(engine, query, pairs, [right[i] for i in pairs], shorten, instruction))
        for query, pairs in lists.items()
    ]


def _blocks(
    engine: Engine, query: str, pairs: list[int], documents: list[str], shorten: _Shortening, instruction: str | None
) -> Iterator[Block]:
    [(asked, query_length, query_cut)] = shorten([query], QUERY_LENGTH, "query")
    kept = shorten(documents, DOCUMENT_LENGTH, "document")
    for block in blocks([length for _, length, _ in kept], query_length, engine.max_model_len):
        own = kept[block.start : block.stop]
        yield Block(
            pairs=tuple(pairs[i] for i in block),
            prompt=render(asked, [text for text, _, _ in own], instruction),
            cut=query_cut + sum(cut for _, _, cut in own),
        )


class _Shortening:
    """Cuts texts as the checkpoint's own code does: to so many tokens, and back into text."""

    def __init__(self, engine: Engine, options: PromptOptions) -> None:
        assert engine.tokenizer is not None, "a listwise checkpoint is not loaded without one"
        self._tokenizer: Tokenizer = engine.tokenizer
        self._may_cut = options.truncate_prompt_tokens is not None
        self._side = options.truncation_side or self._tokenizer.truncation_side

    def __call__(self, texts: list[str], limit: int, what: str) -> list[tuple[str, int, int]]:
        """Each text as it is read, its length in tokens, and how many were cut off."""
        found = []
        for index, (text, ids) in enumerate(zip(texts, self._tokenizer.encode(texts), strict=True)):
            cut = max(0, len(ids) - limit)
            if cut and not self._may_cut:
                raise InvalidPromptError(
                    f"{what} {index} has {len(ids):,} tokens, the limit is {limit:,}: pass truncate_prompt_tokens=-1, "
                    "or split the text"
                )
            if len(ids) >= limit:
                ids = ids[:limit] if self._side == "right" else ids[cut:]
                text = self._tokenizer.decode(ids, skip_special_tokens=False)
            found.append((text, len(ids), cut))
        return found


def listwise_options(options: PromptOptions) -> PromptOptions:
    """How the prompts are read: whole, and with no other text before them."""
    return replace(options, prompt="", prompt_name=None, truncate_prompt_tokens=None)


def listwise_params(params: PoolingParams | None, name: str) -> PoolingParams:
    """What is asked of the vectors that are compared, where nothing is asked of the scores.

    Raises:
        InvalidParameterError: Something is.
    """
    if params not in (None, PoolingParams()):
        raise InvalidParameterError(
            f"pooling_params={params!r}: scores of {name} are cosines and take none", param="pooling_params"
        )
    return PoolingParams(normalize=False)


def list_scores(blocks: Sequence[Block], vectors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The scores of one query's pairs, by their places.

    The query has a vector in each block. Their mean, weighted by how well the block's best document fits it there, is
    compared with the vectors of all documents.

    Args:
        blocks: Of the query.
        vectors: `[documents + 1, E]` of each: its documents', then the query's.
    """
    queries = torch.stack([rows[-1] for rows in vectors])
    weights = torch.stack([(1 + F.cosine_similarity(rows[:-1], rows[-1:], dim=-1).max()) / 2 for rows in vectors])
    query_E = (weights @ queries) / weights.sum()
    places = [place for block in blocks for place in block.pairs]
    documents = torch.cat([rows[:-1] for rows in vectors])
    return dict(zip(places, F.cosine_similarity(documents, query_E[None], dim=-1), strict=True))


def count_cut(block: Block, request: Request) -> None:
    """Counts what was cut off texts before they became a prompt."""
    request.num_truncated_tokens += block.cut

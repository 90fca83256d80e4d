"""What a request returns. The names are those that users of vLLM know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class PoolingOutput:
    """The raw result of one request.

    Attributes:
        data: float32 on the CPU: `[E]` for a sequence-level task, `[tokens, E]` for a token-level one.
    """

    data: torch.Tensor

    def numpy(self) -> numpy.ndarray:
        """The same memory as a numpy array, without a copy."""
        return self.data.numpy()


@dataclass(frozen=True)
class EmbeddingOutput(PoolingOutput):
    """One embedding. `data` is `[E]`, float32."""

    @cached_property
    def embedding(self) -> list[float]:
        """The vector as a list of Python floats, made on first use; `numpy()` and `data` cost nothing."""
        return self.data.tolist()

    @property
    def hidden_size(self) -> int:
        return self.data.shape[-1]


@dataclass(frozen=True)
class SparseEmbeddingOutput(PoolingOutput):
    """One sparse vector: the dimensions that are not 0, and their weights.

    Attributes:
        data: `[active]` float32: the weights.
        indices: `[active]` int32: the dimension of each, ascending. For SPLADE and BGE-M3 these are token ids.
        size: Length of the whole vector, such as the size of the vocabulary.
    """

    indices: torch.Tensor
    size: int

    @property
    def values(self) -> torch.Tensor:
        """`[active]` float32: the weights."""
        return self.data

    @cached_property
    def weights(self) -> dict[int, float]:
        """Dimension -> weight, made on first use."""
        return dict(zip(self.indices.tolist(), self.data.tolist(), strict=True))

    def to_sparse(self) -> torch.Tensor:
        """A `torch.sparse_coo` tensor of shape `[size]`, as sentence-transformers gives it."""
        return torch.sparse_coo_tensor(
            self.indices[None].long(), self.data, (self.size,), is_coalesced=True, check_invariants=False
        )

    def to_dense(self) -> torch.Tensor:
        """`[size]` float32."""
        dense: torch.Tensor = self.to_sparse().to_dense()
        return dense


@dataclass(frozen=True)
class SpanEmbeddingOutput(PoolingOutput):
    """A vector for each span of one text. `data` is `[spans, E]`, float32.

    Attributes:
        token_spans: The tokens of each span: the first and the one after the last, places in `prompt_token_ids`.
    """

    token_spans: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def embeddings(self) -> list[list[float]]:
        """The vectors as lists of Python floats, made on first use."""
        return self.data.tolist()


@dataclass(frozen=True)
class ClassificationOutput(PoolingOutput):
    """Scores of one text. `data` is `[labels]`, float32.

    Attributes:
        labels: Names of the labels.
    """

    labels: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def probs(self) -> list[float]:
        """The scores as Python floats: probabilities, unless the activation was switched off."""
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        return self.data.shape[-1]

    @property
    def label(self) -> str:
        """Name of the label with the highest score."""
        best = int(self.data.argmax())
        return self.labels.get(best, f"LABEL_{best}")


@dataclass(frozen=True)
class TokenClassificationOutput(PoolingOutput):
    """Scores of each token. `data` is `[tokens, labels]`, float32.

    Attributes:
        labels: Names of the labels.
        offsets: Start and end of each token in the text, in characters, (0, 0) for special tokens; None where the
            prompt was token ids, or step tags were chosen.
    """

    labels: Mapping[int, str] = field(default_factory=dict)
    offsets: list[tuple[int, int]] | None = None

    @property
    def token_labels(self) -> list[str]:
        """Name of each token's label with the highest score."""
        return [self.labels.get(best, f"LABEL_{best}") for best in self.data.argmax(dim=-1).tolist()]


@dataclass(frozen=True)
class ScoringOutput(PoolingOutput):
    """How well two texts fit. `data` is a float32 scalar."""

    @property
    def score(self) -> float:
        return float(self.data)


@dataclass(frozen=True)
class RerankResult:
    """One document of a ranking.

    Attributes:
        index: Its place among the documents given.
        document: Its text, or the mapping that it was given as.
        relevance_score: Larger is more relevant.
    """

    index: int
    document: str | Mapping[str, Any]
    relevance_score: float


@dataclass(frozen=True, kw_only=True)
class MultiTaskOutput:
    """The results of several tasks for one text. A task that was not asked for has None.

    Attributes:
        embed: The vector.
        sparse_embed: The sparse vector.
        token_embed: The vectors of its tokens, `[tokens, E]`.
        classify: Its scores.
        token_classify: The scores of its tokens.
        reward: Its reward.
    """

    embed: EmbeddingOutput | None = None
    sparse_embed: SparseEmbeddingOutput | None = None
    token_embed: PoolingOutput | None = None
    classify: ClassificationOutput | None = None
    token_classify: TokenClassificationOutput | None = None
    reward: PoolingOutput | None = None


OutputT = TypeVar("OutputT", bound=PoolingOutput | MultiTaskOutput)


@dataclass(frozen=True)
class _RequestOutput(Generic[OutputT]):
    """A finished request.

    Attributes:
        request_id: As given, or a running number.
        outputs: The result.
        prompt_token_ids: The ids that were run, special tokens included and after truncation. What windows share is
            there once.
        num_cached_tokens: How many of them were read from the prefix cache.
        num_truncated_tokens: How many ids of the prompt were cut off.
        finished: Always True: pooling has no partial results.
        num_windows: How many windows a text was run in that is longer than the model takes; 1 for one that is not.
    """

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    num_truncated_tokens: int = 0
    finished: bool = True
    num_windows: int = 1


class PoolingRequestOutput(_RequestOutput[PoolingOutput]):
    """What `LLM.encode` returns for each prompt."""


class MultiTaskRequestOutput(_RequestOutput[MultiTaskOutput]):
    """What `LLM.encode` returns for each prompt where it is given several tasks."""


class EmbeddingRequestOutput(_RequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns for each prompt."""


class SparseEmbeddingRequestOutput(_RequestOutput[SparseEmbeddingOutput]):
    """What `LLM.sparse_embed` returns for each prompt."""


class SpanEmbeddingRequestOutput(_RequestOutput[SpanEmbeddingOutput]):
    """What `LLM.embed_spans` returns for each prompt."""


class ClassificationRequestOutput(_RequestOutput[ClassificationOutput]):
    """What `LLM.classify` returns for each prompt."""


class TokenClassificationRequestOutput(_RequestOutput[TokenClassificationOutput]):
    """What `LLM.token_classify` returns for each prompt."""


class ScoringRequestOutput(_RequestOutput[ScoringOutput]):
    """What `LLM.score` returns for each pair. `prompt_token_ids` are those of both texts."""

"""What a request returns. The names are those that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

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


OutputT = TypeVar("OutputT", bound=PoolingOutput)


@dataclass(frozen=True)
class _RequestOutput(Generic[OutputT]):
    """A finished request.

    Attributes:
        request_id: As given, or a running number.
        outputs: The result.
        prompt_token_ids: The ids that were run, special tokens included and after truncation.
        num_cached_tokens: How many of them were read from the prefix cache.
        num_truncated_tokens: How many ids of the prompt were cut off.
        finished: Always True: pooling has no partial results.
    """

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    num_truncated_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(_RequestOutput[PoolingOutput]):
    """What `LLM.encode` returns for each prompt."""


class EmbeddingRequestOutput(_RequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns for each prompt."""

"""Sparse vectors: few weights over many dimensions, as a rule a weight per word of the vocabulary.

Between the pooler and the caller a vector is a float32 row `(index, value)` per weight, `[active, 2]`, ascending by
index: an index is exact in float32 up to 2**24, and no vocabulary is that large.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from anypool.kernels.segment_pool import segment_pool, segment_sum
from anypool.pooling.methods import PoolingType, Segments, pool
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import PooledGroup, Pooler

Strategy = Literal["max", "sum"]

# Logits that are in memory at a time, whatever the batch and the vocabulary: tokens by words of a block.
_BLOCK_TOKENS = 1024
_BLOCK_WORDS = 4096


@dataclass(frozen=True)
class Weights:
    """The weights of several sparse vectors, by sequence and then by index.

    Attributes:
        sequences_K: `[K]` int64: whose each is.
        indices_K: `[K]` int64: its dimension.
        values_K: `[K]` float32, none of them 0.
    """

    sequences_K: torch.Tensor
    indices_K: torch.Tensor
    values_K: torch.Tensor

    @classmethod
    def of(cls, rows_NE: torch.Tensor, first: int = 0) -> Weights:
        """What is not 0 in rows of which the columns are the dimensions from `first` on. NaN is kept, to be seen."""
        sequences_K, columns_K = rows_NE.nonzero(as_tuple=True)
        return cls(sequences_K, columns_K + first, rows_NE[sequences_K, columns_K].float())

    @classmethod
    def joined(cls, parts: Sequence[Weights]) -> Weights:
        """The weights of several blocks of dimensions, in the order of the blocks."""
        sequences_K = torch.cat([part.sequences_K for part in parts])
        order_K = sequences_K.argsort(stable=True)
        columns = [torch.cat([part.indices_K for part in parts]), torch.cat([part.values_K for part in parts])]
        return cls(sequences_K[order_K], *(column_K[order_K] for column_K in columns))


def pack_weights(indices_K: torch.Tensor, values_K: torch.Tensor) -> torch.Tensor:
    """`[K, 2]` float32: indices, ascending, and values."""
    return torch.stack([indices_K.float(), values_K.float()], dim=-1)


def unpack_weights(rows_K2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[K]` int32 indices and `[K]` float32 values of a packed vector."""
    return rows_K2[:, 0].int(), rows_K2[:, 1].contiguous()


def prune(rows_K2: torch.Tensor, most: int | None) -> torch.Tensor:
    """The `most` largest weights of a packed vector, by absolute value. Of equal ones the lower index is kept.

    `torch.topk`, with which sentence-transformers does the same, says nothing about equal ones.
    """
    if most is None or len(rows_K2) <= most:
        return rows_K2
    order_K = rows_K2[:, 1].abs().argsort(descending=True, stable=True)
    return rows_K2[order_K[:most].sort().values]


class SparsePooler(Pooler):
    """Hidden states -> a sparse vector per sequence."""

    @abstractmethod
    def weights(self, hidden_TD: torch.Tensor, segments: Segments) -> Weights:
        """The vectors of all sequences, before any weight is left out."""

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        found = self.weights(hidden_TD, segments)
        counts = found.sequences_K.bincount(minlength=len(plans)).tolist()
        vectors = pack_weights(found.indices_K, found.values_K).split(counts)
        kept = [prune(rows_K2, plan.max_active_dims) for rows_K2, plan in zip(vectors, plans, strict=True)]
        return [PooledGroup(tuple(range(len(plans))), torch.cat(kept), tuple(map(len, kept)))]


class SpladePooler(SparsePooler):
    """SPLADE: a weight per word, from the logits of a masked language model (Formal et al., arXiv:2107.05720).

    The weight of word v is max or sum over tokens t of log(1 + relu(logit[t, v])). The logits of all tokens for all
    words are never in memory: the product runs over blocks of both, and each block is folded at once.

    Args:
        transform: Hidden states -> what is multiplied with the decoder.
        decoder_VD: `[V, D]`: a row per word; may be the input embedding.
        bias_V: `[V]` added to the logits, or None.
        strategy: "max" (arXiv:2109.10086) or "sum" (arXiv:2107.05720).
        twice: Whether the logarithm is taken twice (arXiv:2504.14839).
    """

    def __init__(
        self,
        transform: nn.Module,
        decoder_VD: nn.Parameter,
        bias_V: nn.Parameter | None,
        *,
        strategy: Strategy = "max",
        twice: bool = False,
    ) -> None:
        super().__init__()
        self.transform, self.decoder_VD, self.bias_V = transform, decoder_VD, bias_V
        self.strategy, self.twice = strategy, twice

    def weights(self, hidden_TD: torch.Tensor, segments: Segments) -> Weights:
        states_TD = self.transform(hidden_TD)
        words = range(0, len(self.decoder_VD), _BLOCK_WORDS)
        return Weights.joined([Weights.of(self._block(states_TD, segments, first), first) for first in words])

    def _block(self, states_TD: torch.Tensor, segments: Segments, first: int) -> torch.Tensor:
        """`[N, B]` float32 weights of the words from `first` on."""
        decoder_BD = self.decoder_VD[first : first + _BLOCK_WORDS]
        bias_B = None if self.bias_V is None else self.bias_V[first : first + _BLOCK_WORDS]
        folded_NB: torch.Tensor | None = None
        for start, stop, pieces in _token_blocks(segments.lengths):
            logits_TB = states_TD[start:stop] @ decoder_BD.T
            folded_NB = self._fold(logits_TB, bias_B, pieces, folded_NB, len(segments.lengths))
        assert folded_NB is not None
        return folded_NB if self.strategy == "sum" else self._activate(_plus(folded_NB, bias_B))

    def _fold(
        self,
        logits_TB: torch.Tensor,
        bias_B: torch.Tensor | None,
        pieces: Sequence[tuple[int, int]],
        folded_NB: torch.Tensor | None,
        count: int,
    ) -> torch.Tensor:
        """Folds a block of tokens, of which each piece, a sequence and a length, belongs to one sequence.

        Bias and activation do not change which logit is the largest, so for the maximum they wait until the end.
        """
        lengths = [length for _, length in pieces]
        if self.strategy == "sum":
            logits_TB = self._activate(_plus(logits_TB.float(), bias_B))
        piece_PB = _segments(logits_TB, lengths, self.strategy)
        if len(pieces) == count and folded_NB is None:
            return piece_PB
        if folded_NB is None:
            empty = 0.0 if self.strategy == "sum" else float("-inf")
            folded_NB = piece_PB.new_full((count, piece_PB.shape[1]), empty)
        first, last = pieces[0][0], pieces[-1][0] + 1
        rows_PB = folded_NB[first:last]
        if self.strategy == "sum":
            rows_PB += piece_PB
        else:
            torch.maximum(rows_PB, piece_PB, out=rows_PB)
        return folded_NB

    def _activate(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu_().log1p_()
        return weights.log1p_() if self.twice else weights


class LexicalPooler(SparsePooler):
    """A weight per word of the text: relu(w h[t] + b), the largest where a word stands more than once.

    As BGE-M3 has it (Chen et al., arXiv:2402.03216).

    Args:
        linear: Hidden states, float32 -> one number each.
        unused: Ids of tokens that get no weight, such as special tokens.
        size: Size of the vocabulary.
    """

    def __init__(self, linear: nn.Linear, unused: Sequence[int], size: int) -> None:
        super().__init__()
        self.linear, self.unused, self.size = linear, tuple(unused), size

    def weights(self, hidden_TD: torch.Tensor, segments: Segments) -> Weights:
        assert segments.input_ids_T is not None
        ids_T = segments.input_ids_T.long()
        values_T = self.linear(hidden_TD.float())[:, 0].relu()
        for token in self.unused:
            values_T = values_T.masked_fill(ids_T == token, 0.0)
        lengths_N = torch.tensor(segments.lengths, device=ids_T.device)
        sequences_T = torch.arange(len(lengths_N), device=ids_T.device).repeat_interleave(lengths_N)
        words_K, places_T = (sequences_T * self.size + ids_T).unique(return_inverse=True)
        largest_K = values_T.new_zeros(len(words_K)).scatter_reduce_(0, places_T, values_T, "amax")
        kept_K = largest_K != 0
        words_K = words_K[kept_K]
        return Weights(words_K // self.size, words_K % self.size, largest_K[kept_K])


class ProjectedTokenPooler(Pooler):
    """A projected vector per token but the first, normalised where the plan says so.

    BGE-M3's multi-vector output (Chen et al., arXiv:2402.03216): the first token's state is the dense vector.

    Args:
        linear: Hidden states, float32 -> vectors.
    """

    left_out = 1

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = []
        for index, (rows_LD, plan) in enumerate(zip(hidden_TD.split(segments.lengths), plans, strict=True)):
            vectors_LE = self.linear(rows_LD[self.left_out :].float())
            if plan.normalize:
                vectors_LE = nn.functional.normalize(vectors_LE, dim=-1)
            groups.append(PooledGroup((index,), vectors_LE, (len(vectors_LE),)))
        return groups


class AutoEncoderPooler(SparsePooler):
    """CSR: the largest latent dimensions of a sparse autoencoder over an embedding (Wen et al., arXiv:2503.01776).

    Args:
        types: Pooling types of the embedding.
        head: What follows pooling, float32.
        encoder: The embedding -> latent dimensions, before the relu.
    """

    def __init__(self, types: tuple[PoolingType, ...], head: nn.Module, encoder: nn.Module) -> None:
        super().__init__()
        self.types, self.head, self.encoder = types, head, encoder

    def weights(self, hidden_TD: torch.Tensor, segments: Segments) -> Weights:
        return Weights.of(self.encoder(self.head(pool(hidden_TD, segments, self.types))).relu())


class LatentEncoder(nn.Module):
    """(x - pre_bias) W^T + latent_bias, over rows that are centred and divided by their deviation where that is asked.

    Args:
        in_features: Size of the embedding.
        out_features: Number of latent dimensions.
        standardize: Whether rows become (x - mean) / (standard deviation + 1e-5) first.
    """

    def __init__(self, in_features: int, out_features: int, *, standardize: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.standardize = in_features, out_features, standardize
        self.pre_bias = nn.Parameter(torch.empty(in_features))
        self.encoder = nn.Linear(in_features, out_features, bias=False)
        self.latent_bias = nn.Parameter(torch.empty(out_features))

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        if self.standardize:
            rows_NE = rows_NE - rows_NE.mean(dim=-1, keepdim=True)
            rows_NE = rows_NE / (rows_NE.std(dim=-1, keepdim=True) + 1e-5)
        return nn.functional.linear(rows_NE - self.pre_bias, self.encoder.weight, self.latent_bias)


def _token_blocks(lengths: Sequence[int]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Start and stop of each block of tokens, and which sequences stand in it with how many tokens."""
    blocks: list[tuple[int, int, list[tuple[int, int]]]] = []
    start, pieces, room = 0, [], _BLOCK_TOKENS
    for sequence, length in enumerate(lengths):
        while length:
            taken = min(length, room)
            pieces.append((sequence, taken))
            length, room = length - taken, room - taken
            if not room:
                blocks.append((start, start + _BLOCK_TOKENS, pieces))
                start, pieces, room = start + _BLOCK_TOKENS, [], _BLOCK_TOKENS
    if pieces:
        blocks.append((start, start + _BLOCK_TOKENS - room, pieces))
    return blocks


def _segments(rows_TB: torch.Tensor, lengths: Sequence[int], strategy: Strategy) -> torch.Tensor:
    """`[P, B]` float32: the maximum or the sum of consecutive rows."""
    if rows_TB.device.type == "cpu":  # its reductions over one piece after the other are faster than those over all
        reduce = torch.amax if strategy == "max" else torch.sum
        return torch.stack([reduce(piece, dim=0) for piece in rows_TB.split(list(lengths))]).float()
    lengths_P = torch.tensor(lengths, device=rows_TB.device)
    if strategy == "sum":
        return segment_sum(rows_TB, lengths_P)
    bounds_P1 = nn.functional.pad(lengths_P.cumsum(0), (1, 0)).int()
    return segment_pool(rows_TB, bounds_P1, "MAX")


def _plus(logits: torch.Tensor, bias_B: torch.Tensor | None) -> torch.Tensor:
    return logits if bias_B is None else logits + bias_B.float()

"""Attention behind cached keys equals a softmax over the whole sequence with a full mask."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from anypool.model_executor.attention import Attention, AttentionMetadata, PrefixKeys, grouped
from tests.models.parity import CPU, PoisonedStore

BLOCK = 16
# Tokens before, own tokens: runs of equal ones, single queries, block borders, more queries than a block of them.
SEQUENCES = ((0, 5), (0, 5), (7, 5), (7, 5), (16, 5), (16, 1), (15, 1), (1, 1), (1, 2), (33, 300), (520, 270), (0, 300))
VALUE_SIZE = 6


def full_softmax(
    q_LHK: torch.Tensor,
    k_SGK: torch.Tensor,
    v_SGV: torch.Tensor,
    *,
    scale: float,
    left: int,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """`[L, H, V]` of the last L positions, in float64."""
    repeats = q_LHK.shape[1] // k_SGK.shape[1]
    q_HLK = q_LHK.double().transpose(0, 1)
    k_HSK, v_HSV = (x.double().repeat_interleave(repeats, dim=1).transpose(0, 1) for x in (k_SGK, v_SGV))
    scores_HLS = q_HLK @ k_HSK.transpose(1, 2) * scale
    if softcap is not None:
        scores_HLS = softcap * torch.tanh(scores_HLS / softcap)
    keys = len(k_SGK)
    position_L1 = torch.arange(keys - len(q_LHK), keys)[:, None]
    distance_LS = position_L1 - torch.arange(keys)
    hidden_LS = (distance_LS < 0) | ((distance_LS > left) if left >= 0 else torch.tensor(False))
    scores_HLS = scores_HLS.masked_fill(hidden_LS, -torch.inf)
    if sinks_H is not None:
        sinks_HL1 = sinks_H.double()[:, None, None].expand(-1, len(q_LHK), 1)
        scores_HLS = torch.cat([scores_HLS, sinks_HL1], dim=-1)
    return (scores_HLS.softmax(-1)[..., :keys] @ v_HSV).transpose(0, 1).float()


class Case:
    """Sequences with random keys, those before their queries in a store and those of their own in a batch."""

    def __init__(self, sequences: tuple[tuple[int, int], ...], heads: int, groups: int) -> None:
        generator = torch.Generator().manual_seed(0)
        whole = [before + length for before, length in sequences]
        needed = [-(-keys // BLOCK) for keys in whole]
        order = iter(torch.randperm(sum(needed), generator=generator).tolist())
        tables = [[next(order) for _ in range(n)] for n in needed]
        self.store = PoisonedStore(sum(needed), BLOCK, CPU)
        self.keys = [torch.randn(n, groups, 8, generator=generator) for n in whole]
        self.values = [torch.randn(n, groups, VALUE_SIZE, generator=generator) for n in whole]
        self.queries = [torch.randn(length, heads, 8, generator=generator) for _, length in sequences]
        starts, lengths = zip(*sequences, strict=True)
        earlier = PrefixKeys.plan(
            self.store, starts=[0] * len(starts), lengths=starts, block_tables=tables, stored=starts
        )
        self.own_keys, self.own_values = (
            torch.cat([x[start:] for x, start in zip(parts, starts, strict=True)]) for parts in (self.keys, self.values)
        )
        earlier.store_own(*(self._before(parts, starts) for parts in (self.keys, self.values)))
        prefix = PrefixKeys.plan(
            self.store, starts=starts, lengths=lengths, block_tables=tables, stored=[0] * len(starts)
        )
        self.attn = AttentionMetadata.from_lengths(lengths, CPU, prefix=prefix)

    @staticmethod
    def _before(parts: list[torch.Tensor], starts: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([x[:start] for x, start in zip(parts, starts, strict=True)])


@pytest.mark.parametrize(
    ("left", "softcap", "with_sinks", "heads", "groups"),
    [
        *itertools.product((-1, 0, 5, 15, 16, 290), (None, 3.0), (False, True), (4,), (2,)),
        (-1, None, False, 4, 4),
        (9, None, False, 4, 1),
        (-1, 3.0, False, 4, 1),
        (9, None, True, 4, 4),
    ],
)
@pytest.mark.parametrize("small_parts", [False, True])
def test_attention_behind_a_prefix_equals_a_full_softmax(
    left: int,
    softcap: float | None,
    with_sinks: bool,
    heads: int,
    groups: int,
    small_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small_parts:  # one sequence and few queries at a time, as long prefixes are computed
        monkeypatch.setattr(grouped, "SCORES", 1)
        monkeypatch.setattr(grouped, "_KEYS", 1)
    case = Case(SEQUENCES, heads, groups)
    sinks_H = torch.randn(heads, generator=torch.Generator().manual_seed(1)) if with_sinks else None
    attend = Attention(scale=0.4, window=(left, 0), softcap=softcap)
    actual = attend(torch.cat(case.queries), case.own_keys, case.own_values, case.attn, sinks_H=sinks_H)
    expected = torch.cat(
        [
            full_softmax(q, k, v, scale=0.4, left=left, softcap=softcap, sinks_H=sinks_H)
            for q, k, v in zip(case.queries, case.keys, case.values, strict=True)
        ]
    )
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("left", "most"), [(-1, 512 * 1556 + 88 * 1644), (9, 600 * 266)])
def test_neither_keys_after_a_block_of_queries_nor_outside_of_its_window_are_computed(
    left: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    fused = F.scaled_dot_product_attention

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        computed.append(q.shape[2] * k.shape[2])
        mask = options["attn_mask"]
        assert isinstance(mask, torch.Tensor)
        assert mask.shape == (q.shape[2], k.shape[2])
        return fused(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    case = Case(((1044, 600),), 2, 1)
    Attention(scale=1.0, window=(left, 0))(case.queries[0], case.own_keys, case.own_values, case.attn)
    assert 0 < sum(computed) <= most


def test_blocks_that_a_window_leaves_behind_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(((100, 20),), 2, 1)
    read = []
    blocks_of = case.store.read_blocks

    def recorded(layer: int, blocks_B: torch.Tensor, *out: torch.Tensor) -> None:
        read.extend(blocks_B.tolist())
        blocks_of(layer, blocks_B, *out)

    monkeypatch.setattr(case.store, "read_blocks", recorded)
    Attention(scale=1.0, window=(9, 0))(case.queries[0], case.own_keys, case.own_values, case.attn)
    assert case.attn.prefix is not None
    assert read == case.attn.prefix.block_tables[0].tolist()[5:7]  # tokens 91 to 99 are in blocks 5 and 6


@pytest.mark.parametrize("window", [(-1, -1), (4, 4)])
def test_a_layer_that_is_not_causal_cannot_have_a_prefix(window: tuple[int, int]) -> None:
    case = Case(((7, 5),), 2, 1)
    with pytest.raises(AssertionError, match="only causal layers"):
        Attention(scale=1.0, window=window)(case.queries[0], case.own_keys, case.own_values, case.attn)


def test_runs_are_neighbours_of_equal_length_and_prefix() -> None:
    attn = Case(((0, 5), (0, 5), (7, 5), (7, 5), (7, 6)), 2, 1).attn
    assert [tuple(run) for run in attn.runs] == [(0, 0, 2, 5, 0, 5), (10, 2, 2, 5, 7, 5), (20, 4, 1, 6, 7, 6)]

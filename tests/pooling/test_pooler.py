"""A batch of mixed tasks, sizes and normalisation gives each sequence what it gets alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anypool.pooling.heads import Dense
from anypool.pooling.methods import PoolingType, Segments
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import DispatchPooler, EmbedPooler, PooledGroup, TokenEmbedPooler
from anypool.pooling.tasks import PoolingTask

DIM = 12
CPU = torch.device("cpu")


def _pooler() -> DispatchPooler:
    torch.manual_seed(0)
    head = nn.Sequential(Dense(2 * DIM, 10, bias=True, activation=nn.Tanh(), residual=True))
    return DispatchPooler(
        {
            PoolingTask.EMBED: EmbedPooler((PoolingType.MEAN, PoolingType.LAST), head),
            PoolingTask.TOKEN_EMBED: TokenEmbedPooler(),
        }
    )


POOLER = _pooler().requires_grad_(False)

plans = st.one_of(
    st.builds(
        PoolingPlan,
        task=st.just(PoolingTask.EMBED),
        normalize=st.booleans(),
        dimensions=st.sampled_from([None, 1, 4, 10]),
    ),
    st.builds(PoolingPlan, task=st.just(PoolingTask.TOKEN_EMBED), normalize=st.booleans()),
)
sequences = st.tuples(st.sampled_from([1, 2, 7, 63, 130]), plans, st.booleans())


def _results(groups: list[PooledGroup], count: int) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        parts = group.values.unbind(0) if group.rows is None else group.values.split(group.rows)
        for request, part in zip(group.requests, parts, strict=True):
            assert request not in found
            found[request] = part
    assert sorted(found) == list(range(count))
    return [found[i] for i in range(count)]


@settings(max_examples=40)
@given(st.lists(sequences, min_size=1, max_size=8))
def test_a_mixed_batch_equals_one_sequence_at_a_time(batch: list[tuple[int, PoolingPlan, bool]]) -> None:
    lengths = tuple(length for length, _, _ in batch)
    skips = tuple(length // 2 if skipped else 0 for length, _, skipped in batch)
    wanted = [plan for _, plan, _ in batch]
    hidden_TD = torch.randn(sum(lengths), DIM, generator=torch.Generator().manual_seed(1))
    together = _results(POOLER(hidden_TD, Segments(lengths, skips, CPU), wanted), len(batch))
    start = 0
    for i, (length, plan, _) in enumerate(batch):
        part = hidden_TD[start : start + length]
        [alone] = _results(POOLER(part, Segments((length,), (skips[i],), CPU), [plan]), 1)
        torch.testing.assert_close(together[i], alone, atol=1e-6, rtol=0)
        start += length


def test_sizes_and_lengths_follow_the_plans() -> None:
    embed = PoolingPlan(task=PoolingTask.EMBED, normalize=True, dimensions=4)
    tokens = PoolingPlan(task=PoolingTask.TOKEN_EMBED, normalize=False)
    hidden_TD = torch.randn(10, DIM)
    one, two, three = _results(POOLER(hidden_TD, Segments((3, 5, 2), (0, 0, 0), CPU), [tokens, embed, tokens]), 3)
    torch.testing.assert_close(one, hidden_TD[:3], atol=0, rtol=0)
    torch.testing.assert_close(three, hidden_TD[8:], atol=0, rtol=0)
    assert two.shape == (4,)
    torch.testing.assert_close(two.norm(), torch.tensor(1.0))


def test_an_installed_pooler_takes_the_place_of_the_one_before() -> None:
    pooler = _pooler()
    pooler.install(PoolingTask.EMBED, EmbedPooler((PoolingType.CLS,)))
    plan = PoolingPlan(task=PoolingTask.EMBED, normalize=False)
    hidden_TD = torch.randn(4, DIM)
    [row] = _results(pooler(hidden_TD, Segments((4,), (0,), CPU), [plan]), 1)
    torch.testing.assert_close(row, hidden_TD[0], atol=0, rtol=0)
    assert pooler.tasks == (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)

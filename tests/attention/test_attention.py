"""Attention over packed sequences equals a plain softmax over each sequence alone."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from anypool.errors import ConfigError
from anypool.model_executor.attention import Attention, AttentionMetadata, bmm, grouped
from anypool.model_executor.attention.padded import is_padded, padded_groups

RAGGED = (1, 7, 16, 17, 33, 40, 40, 47, 48, 48, 63, 130, 40, 5)


def plain(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    lengths: tuple[int, ...],
    layer: Attention,
    keys: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Scores, mask, softmax and sum written out in float64, one sequence and head at a time."""
    share = q_THK.shape[1] // k_TGK.shape[1]
    rows = []
    parts = (x.double().split(lengths) for x in (q_THK, k_TGK, v_TGK))
    for q, k, v, seen in zip(*parts, keys or lengths, strict=True):
        ahead = torch.arange(len(k)) - torch.arange(len(q)).unsqueeze(1)
        left, right = layer.window
        hidden = (ahead < -left if left >= 0 else ahead < -len(q)) | (ahead > right if right >= 0 else ahead > len(q))
        hidden = hidden | (torch.arange(len(k)) >= seen)
        heads = []
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // share].T * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            probs = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)  # a query may see nothing
            heads.append(probs @ v[:, h // share])
        rows.append(torch.stack(heads, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize("way", ["fused", "bmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 9), (49, 0), (63, 63)])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 32), (4, 1, 64), (6, 2, 8)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ragged_sequences_equal_a_plain_softmax(
    way: str,
    dtype: torch.dtype,
    window: tuple[int, int],
    heads: int,
    groups: int,
    size: int,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYPOOL_CPU_ATTENTION", way)
    monkeypatch.setattr(bmm, "SCORES", 10_000)  # so that blocks of sequences are several
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(RAGGED), heads + 2 * groups, size, generator=generator).to(dtype)
    q, k, v = qkv.split([heads, groups, groups], dim=1)  # as a fused projection gives them: not contiguous
    layer = Attention(scale=size**-0.5, window=window, softcap=softcap)
    actual = layer(q, k, v, AttentionMetadata.from_lengths(RAGGED, torch.device("cpu")))
    assert actual.dtype == dtype
    # bf16 rounds scores or probabilities to 8 bits, and the result.
    tolerance = 2e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(actual.double(), plain(q, k, v, RAGGED, layer), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("way", ["fused", "bmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 9), (49, 0), (63, 63)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("block", [16, 256])
def test_tokens_that_are_not_attended_to_attend_to_the_others(
    way: str,
    dtype: torch.dtype,
    window: tuple[int, int],
    softcap: float | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what lies further from the last key than the window is 0."""
    monkeypatch.setenv("ANYPOOL_CPU_ATTENTION", way)
    monkeypatch.setattr(grouped, "_QUERY_BLOCK", block)
    keys = tuple(1 if i % 4 == 0 else n if i % 4 == 1 else max(1, n // 2) for i, n in enumerate(RAGGED))
    qkv = torch.randn(sum(RAGGED), 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    for spoilt in (k, v):  # what is not attended to has no part in it
        for row, seen, length in zip(accumulate((0, *RAGGED)), keys, RAGGED, strict=False):
            spoilt[row + seen : row + length] = 99.0
    layer = Attention(scale=0.25, window=window, softcap=softcap)
    attn = AttentionMetadata.from_lengths(RAGGED, torch.device("cpu"), key_lengths=keys)
    expected = plain(q, k, v, RAGGED, layer, keys)
    tolerance = 2e-6 if dtype == torch.float32 else 0.03
    actual = layer(q, k, v, attn).double()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_what_is_padded_does_not_see_what_pads_nor_neighbours() -> None:
    """NaN in every other sequence, and in what a padded place could read, does not get through."""
    lengths = (40, 45, 48)
    qkv = torch.randn(sum(lengths), 2, 3 * 16).bfloat16()
    poisoned = qkv.clone()
    poisoned[:40] = math.nan
    poisoned[85:] = math.nan
    layer, attn = Attention(scale=0.25), AttentionMetadata.from_lengths(lengths, torch.device("cpu"))
    clean, among_nan = (layer(*x.chunk(3, dim=-1), attn)[40:85] for x in (qkv, poisoned))
    # A group with NaN takes the ordinary softmax, so the same numbers are rounded otherwise.
    torch.testing.assert_close(clean, among_nan, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("base", [-250.0, -60.0, 0.0, 60.0, 200.0])
@pytest.mark.parametrize("lengths", [(40, 45, 48), (64, 64), (20, 20), (300,)])
def test_scores_far_from_zero_weigh_as_those_near_it(
    lengths: tuple[int, ...], base: float, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a power of two of a score is infinite or zero."""
    monkeypatch.setenv("ANYPOOL_CPU_ATTENTION", "bmm")
    tokens = sum(lengths)
    q, k = (torch.zeros(tokens, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    q[..., :2] = 1.0
    k[..., 0], k[..., 1] = base, torch.arange(tokens)[:, None] % 4  # their sum is exact in bfloat16
    v = torch.randn(tokens, 2, 16).bfloat16()
    layer = Attention(scale=1.0, window=(-1, 0) if causal else (-1, -1))
    actual = layer(q, k, v, AttentionMetadata.from_lengths(lengths, torch.device("cpu")))
    tolerance = 0.03 if abs(base) != 60 else 0.15  # times log2(e), 60 is rounded to steps of 1/2
    torch.testing.assert_close(actual.double(), plain(q, k, v, lengths, layer), atol=tolerance, rtol=tolerance)


def test_neighbours_of_near_lengths_are_one_group_and_the_rest_stay_out() -> None:
    groups = list(padded_groups(RAGGED, RAGGED, (-1, -1)))
    assert [(g.rows.start, g.count, g.length) for g in groups] == [
        (41, 6, 48),
        (297, 1, 64),
        (360, 1, 144),
        (490, 1, 48),
    ]
    assert sum(g.rows.stop - g.rows.start for g in groups) == sum(n for n in RAGGED if is_padded(n, n, (-1, -1)))


@pytest.mark.parametrize(
    ("length", "window", "padded"),
    [(32, (-1, -1), False), (33, (-1, 0), True), (512, (-1, -1), True), (513, (-1, -1), False), (48, (47, 0), True),
     (49, (47, 0), False), (49, (63, 63), True), (65, (63, 63), False)],
)  # fmt: skip
def test_a_window_that_cuts_into_a_sequence_keeps_it_from_being_padded(
    length: int, window: tuple[int, int], padded: bool
) -> None:
    assert is_padded(length, length, window) == padded


def test_long_causal_sequences_are_equal_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (600, 600, 300)
    q, k, v = torch.randn(sum(lengths), 4, 16).bfloat16().split([2, 1, 1], dim=1)
    layer, attn = Attention(scale=0.25, window=(-1, 0)), AttentionMetadata.from_lengths(lengths, torch.device("cpu"))
    expected = plain(q, k, v, lengths, layer)
    for way in ("fused", "bmm"):
        monkeypatch.setenv("ANYPOOL_CPU_ATTENTION", way)
        torch.testing.assert_close(layer(q, k, v, attn).double(), expected, atol=0.03, rtol=0.03)


def test_sinks_take_part_in_the_softmax_without_a_value() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    sinks_H = torch.randn(4)
    scores = torch.cat([q @ k.transpose(-1, -2) * 0.25, sinks_H.view(4, 1, 1).expand(2, 4, 9, 1)], dim=-1)
    actual = bmm.bmm_attention(q, k, v, scale=0.25, sinks_H=sinks_H)
    torch.testing.assert_close(actual, scores.softmax(-1)[..., :-1] @ v)


def test_the_way_of_attention_is_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYPOOL_CPU_ATTENTION", "flash")
    with pytest.raises(ConfigError, match=r"ANYPOOL_CPU_ATTENTION='flash' is unknown; known: auto, fused, bmm"):
        bmm.bmm_is_faster(torch.zeros(1, 1, 1, dtype=torch.bfloat16), 64)

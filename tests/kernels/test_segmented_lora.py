"""What adapters add: plain torch gives what a loop over rows gives, and the kernel gives what plain torch gives."""

from __future__ import annotations

import pytest
import torch

from anypool.kernels.segmented_lora import BASE, LoRARows, LoRAStack, reference, segmented_lora
from tests.kernels.conftest import DTYPES, LENGTHS, assert_near, random

RANKS = (3, 8, 0, 1)
# Of each of the lengths: neighbours of one adapter, rows of none, and one slot whose adapter has nothing here.
SLOTS = (0, 1, 3, BASE, 1, 0, 2)


def make_stack(
    size: int, outputs: int, device: torch.device, dtype: torch.dtype, ranks: tuple[int, ...] = RANKS
) -> LoRAStack:
    """Adapters of the ranks, in slots that had others before. What they add is smaller than what is there."""
    lora = LoRAStack(len(ranks), max(ranks), size, outputs, dtype=dtype, device=device)
    lora.a_SRD.fill_(float("nan"))
    lora.b_SOR.fill_(float("nan"))
    for slot, rank in enumerate(ranks):
        if rank > 0:
            a_RD = random(rank, size, device=device, seed=10 + slot) / size**0.5
            lora.put(slot, a_RD, random(outputs, rank, device=device, seed=20 + slot) / (2 * rank**0.5), 1 / (1 + slot))
    return lora


def by_rows(y_TO: torch.Tensor, x_TD: torch.Tensor, lora: LoRAStack, rows: LoRARows, offset: int) -> torch.Tensor:
    """The formula, row by row and in float64."""
    expected_TO = y_TO.double()
    for row, slot in enumerate(rows.slots_T.tolist()):
        if slot != BASE and (rank := lora.ranks[slot]) > 0:
            a_RD, b_OR = lora.a_SRD[slot, :rank].double(), lora.b_SOR[slot, :, :rank].double()
            added_O = lora.scalings[slot] * (b_OR @ (a_RD @ x_TD[row].double()))
            expected_TO[row, offset : offset + len(added_O)] += added_O
    return expected_TO.to(y_TO.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 5])
def test_plain_torch_adds_to_each_row_what_its_adapter_says(offset: int, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    x_TD, y_TO = (random(sum(LENGTHS), size, device=device, dtype=dtype, seed=size) for size in (33, 30))
    lora, rows = make_stack(33, 20, device, dtype), LoRARows.pack(SLOTS, LENGTHS)
    expected_TO = by_rows(y_TO, x_TD, lora, rows, offset)
    assert segmented_lora(y_TO, x_TD, lora, rows, offset=offset) is y_TO
    assert_near(y_TO, expected_TO, within=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "outputs", "offset", "ranks", "lengths"),
    [
        (1, 1, 0, RANKS, LENGTHS[:4]),
        (33, 20, 5, RANKS, LENGTHS),
        (300, 130, 0, RANKS, LENGTHS[:5]),
        (1500, 33, 1, (1, 70, 16, 64), LENGTHS[:4]),
    ],
)
def test_the_kernel_equals_the_reference_over_ragged_segments(
    size: int,
    outputs: int,
    offset: int,
    ranks: tuple[int, ...],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    kernels: None,
    device: torch.device,
) -> None:
    x_TD = random(sum(lengths), size, device=device, dtype=dtype)
    actual_TO = random(sum(lengths), offset + outputs + 2, device=device, dtype=dtype, seed=1)
    lora = make_stack(size, outputs, device, dtype, ranks)
    rows = LoRARows.pack(SLOTS[: len(lengths)], lengths, device=device)
    expected_TO = actual_TO.clone()
    reference.segmented_lora(expected_TO[:, offset : offset + outputs], x_TD, lora, rows)
    segmented_lora(actual_TO, x_TD, lora, rows, offset=offset)
    assert_near(actual_TO, expected_TO, within=1e-5)


def test_adapters_may_change_with_every_row(kernels: None, device: torch.device) -> None:
    x_TD, y_TO = random(130, 40, device=device), random(130, 24, device=device, seed=1)
    lora, rows = make_stack(40, 24, device, torch.float32), LoRARows.pack((3, BASE, 0, 1, 2) * 26, (1,) * 130)
    expected_TO = by_rows(y_TO, x_TD, lora, rows, 0)
    assert_near(segmented_lora(y_TO, x_TD, lora, rows), expected_TO, within=1e-5)


def test_rows_may_lie_column_by_column(kernels: None, device: torch.device) -> None:
    x_TD, y_TO = random(33, 24, device=device).T, random(24, 7, device=device, seed=1)
    lora, rows = make_stack(33, 7, device, torch.float32), LoRARows.pack((1, 0), (8, 16), device=device)
    expected_TO = by_rows(y_TO, x_TD, lora, rows, 0)
    assert_near(segmented_lora(y_TO, x_TD, lora, rows), expected_TO, within=1e-5)


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_rows_that_only_the_device_knows_are_what_it_says(
    way: str, kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a CUDA graph, whose memory is overwritten between its runs."""
    monkeypatch.setenv("ANYPOOL_KERNELS", way)
    x_TD, y_TO = random(70, 33, device=device), random(70, 20, device=device, seed=1)
    lora, slots_T = make_stack(33, 20, device, torch.float32), torch.full((70,), BASE, dtype=torch.int32, device=device)
    static = LoRARows(slots_T)
    for slots in ((0, 3, BASE), (BASE, 1, 0), (2, BASE, BASE)):
        rows = LoRARows.pack(slots, (7, 43, 20), device=device)
        slots_T.copy_(rows.slots_T)
        expected_TO = by_rows(y_TO, x_TD, lora, rows, 0)
        assert_near(segmented_lora(y_TO.clone(), x_TD, lora, static), expected_TO, within=1e-5)


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_rows_of_no_adapter_keep_every_bit(
    way: str, kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where an adapter beside them gives NaN, and where theirs was taken out of its slot."""
    monkeypatch.setenv("ANYPOOL_KERNELS", way)
    x_TD, y_TO = random(30, 33, device=device), random(30, 20, device=device, seed=1)
    lora = make_stack(33, 20, device, torch.float32)
    lora.a_SRD[0].fill_(float("nan"))
    lora.clear(3)
    rows = LoRARows.pack((BASE, 0, 3), (10, 10, 5), device=device).extended(5)
    actual_TO = segmented_lora(y_TO.clone(), x_TD, lora, rows)
    assert actual_TO[10:20].isnan().all()
    for start, end in ((0, 10), (20, 30)):
        assert torch.equal(actual_TO[start:end], y_TO[start:end])


def test_a_slot_gives_what_was_put_last(kernels: None, device: torch.device) -> None:
    lora = make_stack(33, 20, device, torch.float32)
    a_RD, b_OR = random(2, 33, device=device, seed=5), random(20, 2, device=device, seed=6)
    lora.put(1, a_RD, b_OR, 0.25)  # of a lower rank than what was there
    x_TD = random(9, 33, device=device)
    actual_TO = segmented_lora(torch.zeros(9, 20, device=device), x_TD, lora, LoRARows.pack((1,), (9,), device=device))
    assert_near(actual_TO, 0.25 * x_TD @ a_RD.T @ b_OR.T, within=1e-5)


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_a_row_gets_the_same_in_every_batch(
    way: str, kernels: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYPOOL_KERNELS", way)
    lora = make_stack(1500, 20, device, torch.float32)
    x_TD, y_TO = random(100, 1500, device=device), random(100, 20, device=device, seed=1)
    alone = segmented_lora(y_TO[40:47].clone(), x_TD[40:47], lora, LoRARows.pack((1,), (7,), device=device))
    packed = segmented_lora(y_TO, x_TD, lora, LoRARows.pack((0, 1, BASE), (40, 7, 53), device=device))[40:47]
    assert_near(packed, alone, within=1e-6)


def test_segments_are_runs_of_one_adapter() -> None:
    rows = LoRARows.pack((1, 1, 0, BASE, 0, 2), (3, 2, 0, 4, 1, 1))
    assert rows.segments == ((0, 5, 1), (9, 10, 0), (10, 11, 2))
    assert rows.slots_T.tolist() == [1] * 5 + [BASE] * 4 + [0, 2]
    assert LoRARows(rows.slots_T).runs() == rows.segments


def test_a_batch_without_rows_or_adapters_is_left_alone(kernels: None, device: torch.device) -> None:
    lora = make_stack(33, 20, device, torch.float32)
    y_TO = random(5, 20, device=device)
    for rows in (0, 5):
        x_TD = random(rows, 33, device=device)
        none = LoRARows.pack((BASE,), (rows,), device=device)
        assert torch.equal(segmented_lora(y_TO[:rows].clone(), x_TD, lora, none), y_TO[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_serves_adapters_that_come_later(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    lora = LoRAStack(2, 16, 256, 384, dtype=dtype, device=device)
    x_TD, y_TO = random(64, 256, device=device, dtype=dtype), random(64, 384, device=device, dtype=dtype, seed=1)
    slots_T, out_TO = torch.full((64,), BASE, dtype=torch.int32, device=device), y_TO.clone()
    for _ in range(2):  # compiled before the capture
        segmented_lora(out_TO, x_TD, lora, LoRARows(slots_T))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        segmented_lora(out_TO.copy_(y_TO), x_TD, lora, LoRARows(slots_T))
    for seed, slots in ((1, (0, BASE)), (2, (1, 0)), (3, (BASE, 1))):
        for slot in (0, 1):
            a_RD = random(8 * (slot + 1), 256, device=device, seed=seed) / 16
            lora.put(slot, a_RD, random(384, len(a_RD), device=device, seed=seed + 9) / 4, float(seed))
        rows = LoRARows.pack(slots, (40, 24), device=device)
        slots_T.copy_(rows.slots_T)
        graph.replay()
        expected_TO = y_TO.clone()
        reference.segmented_lora(expected_TO, x_TD, lora, rows)
        assert_near(out_TO, expected_TO, within=1e-5)

"""Batches are filled up to few numbers of rows, and nobody notices."""

from __future__ import annotations

import pytest
import torch

from anypool.model_executor.packed_batch import PackedBatch, common_rows


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 127, 128, 129, 1000, 4095, 4096, 40_000])
def test_rows_grow_by_at_most_a_sixteenth_or_to_a_multiple_of_8(rows: int) -> None:
    common = common_rows(rows)
    assert rows <= common < rows + max(8, rows / 16)
    assert common_rows(common) == common


def test_up_to_4096_rows_there_are_about_a_hundred_shapes() -> None:
    assert len({common_rows(rows) for rows in range(1, 4097)}) < 120


def test_sequences_stay_and_others_of_one_token_follow() -> None:
    batch = PackedBatch.pack(
        [[5, 6, 7], [8, 9]], device=torch.device("cpu"), token_types=[[0, 1, 1], None], pad_token_id=0
    )
    filled = batch.filled()
    assert filled.input_ids_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert filled.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert filled.token_type_ids_T is not None
    assert filled.token_type_ids_T.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert filled.attn.lengths == (3, 2, 1, 1, 1)
    assert filled.attn.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 8]
    assert filled.segments is batch.segments

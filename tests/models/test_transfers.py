"""Batches move in one copy, and nothing of them changes."""

from __future__ import annotations

import pytest
import torch

from anypool.model_executor.faults import is_out_of_memory, is_sticky
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.transfers import ToHost, staged, to_device, views_of

CPU, META = torch.device("cpu"), torch.device("meta")


def test_tensors_of_all_dtypes_lie_behind_each_other() -> None:
    tensors = [torch.arange(5), torch.arange(3, dtype=torch.int32), torch.empty(0), torch.randn(2, 3).half()]
    for view, tensor in zip(views_of(staged(tensors, pin=False), tensors), tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)


def test_nothing_is_copied_where_host_and_device_are_one() -> None:
    tensors = [torch.arange(5), torch.randn(3)]
    assert all(a is b for a, b in zip(to_device(tensors, CPU), tensors, strict=True))
    assert ToHost(tensors).wait()[1] is tensors[1]


def test_a_batch_on_the_device_has_all_its_parts_there() -> None:
    batch = PackedBatch.pack(
        [[5, 6, 7], [8, 9]], device=CPU, skips=[1, 0], token_types=[[0, 1, 1], None], pad_token_id=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anypool.model_executor.transfers.staged", lambda tensors, pin: staged(tensors, pin=False))
        moved = batch.to(META)
    assert (moved.input_ids_T.shape, moved.positions_T.shape) == ((5,), (5,))
    assert moved.segments.input_ids_T is moved.input_ids_T
    assert moved.segments.cu_seqlens is moved.attn.cu_seqlens
    parts = (moved.input_ids_T, moved.attn.cu_seqlens, moved.segments.skips_N, moved.token_type_ids_T)
    assert all(part is not None and part.device == META for part in parts)
    assert batch.to(CPU) is batch


@pytest.mark.parametrize(
    ("words", "short_of_memory", "sticky"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True, False),
        ("CUDA error: out of memory", True, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True, False),
        ("DefaultCPUAllocator: can't allocate memory", True, False),
        ("CUDA error: an illegal memory access was encountered", False, True),
        ("CUDA error: device-side assert triggered", False, True),
        ("CUDA error: unspecified launch failure", False, True),
        ("HIP error: the operation cannot be performed, hardware stack error", False, True),
        ("CUDA error: operation not permitted when stream is capturing", False, False),
        ("mat1 and mat2 shapes cannot be multiplied", False, False),
    ],
)
def test_what_an_error_says_about_the_device(words: str, short_of_memory: bool, sticky: bool) -> None:
    error = RuntimeError(words)
    assert (is_out_of_memory(error), is_sticky(error)) == (short_of_memory, sticky)
    assert not is_sticky(ValueError(words))

"""The kernels of layers, normalisation, rotation and gate, give what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anypool.kernels import gated as gated_op
from anypool.kernels import rms_norm as rms_norm_op
from anypool.kernels import rotary as rotary_op
from anypool.kernels.gated import ACTIVATIONS, gated
from anypool.kernels.rms_norm import rms_norm
from anypool.kernels.rotary import apply_rotary
from tests.kernels.conftest import DTYPES, assert_near, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 33), (63, 300), (0, 16), (7, 3, 64), (5, 2, 3, 24)])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_and_the_sum_before_it(
    has_residual: bool,
    unit_offset: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kernels: None,
    device: torch.device,
) -> None:
    x = random(*shape, device=device, dtype=dtype)
    weight_K = random(shape[-1], device=device, dtype=dtype, seed=1).contiguous()
    residual = random(*shape[:-1], shape[-1], device=device, dtype=dtype, seed=2) if has_residual else None
    options: dict[str, Any] = {"eps": 1e-6, "unit_offset": unit_offset, "residual": residual}
    for actual, expected in zip(
        rms_norm(x, weight_K, **options), rms_norm_op.reference.rms_norm(x, weight_K, **options), strict=True
    ):
        assert_near(actual, expected)


def test_a_residual_lies_in_its_own_way_and_the_sum_is_rounded_before_its_norm(
    kernels: None, device: torch.device
) -> None:
    x = random(63, 300, device=device, dtype=torch.float16)
    residual = random(63, 307, device=device, dtype=torch.float16, seed=2)[:, :300]
    weight_K = torch.ones(300, dtype=torch.float16, device=device)
    normed, total = rms_norm(x, weight_K, eps=1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    alone, _ = rms_norm(x + residual, weight_K, eps=1e-6)
    assert torch.equal(normed, alone)


def test_rows_of_next_to_nothing_are_normalised_by_eps(kernels: None, device: torch.device) -> None:
    x, weight_K = 1e-3 * random(7, 33, device=device), torch.ones(33, device=device)
    expected = torch.nn.functional.rms_norm(x, (33,), weight_K, 1e-6)
    assert_near(rms_norm(x, weight_K, eps=1e-6)[0], expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("base", [-3e4, -1e4, 1e4, 3e4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero_stay_finite(activation: str, base: float, kernels: None, device: torch.device) -> None:
    gate_up_TF = torch.full((2, 6), base, device=device).half()
    gate_up_TF[:, 3:] = 0.5
    assert_near(gated(gate_up_TF, activation), gated_op.reference.gated(gate_up_TF, activation))


def test_heads_of_a_fused_projection_are_normalised_where_they_lie(kernels: None, device: torch.device) -> None:
    heads_THK = random(7, 6, 32, device=device)
    some = heads_THK[:, 4:5]
    weight_K = torch.ones(32, device=device)
    assert_near(rms_norm(some, weight_K, eps=1e-6)[0], rms_norm(some.contiguous(), weight_K, eps=1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "turned"), [(1, 32, 32), (5, 80, 32), (12, 64, 64), (3, 24, 6)])
@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_heads_are_turned(
    tokens: int, heads: int, size: int, turned: int, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    x_THK = random(tokens, heads + 2, size, device=device, dtype=dtype)[:, 1 : heads + 1]
    angles_T1R = random(tokens, 1, turned // 2, device=device).repeat(1, 1, 2)
    cos_T1R, sin_T1R = angles_T1R.cos().to(dtype), angles_T1R.sin().to(dtype)
    expected = rotary_op.reference.apply_rotary(x_THK, cos_T1R, sin_T1R)
    assert_near(apply_rotary(x_THK, cos_T1R, sin_T1R), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 4), (1, 1), (63, 33), (3, 1030)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_in_one_pass(
    activation: str, rows: int, size: int, dtype: torch.dtype, kernels: None, device: torch.device
) -> None:
    gate_up_TF = random(rows, 2 * size, device=device, dtype=dtype)
    assert_near(gated(gate_up_TF, activation), gated_op.reference.gated(gate_up_TF, activation))


def test_an_unknown_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="'sine'; known: gelu, gelu_tanh, silu, relu"):
        gated(torch.randn(1, 2), "sine")

"""`score_head` for GPUs: each row is read once, and its scores are all that is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows

# Elements of a tile: rows by labels by columns, in registers.
_TILE = 8192
_COLUMNS = 256


@triton.jit
def score_head_kernel(
    rows_ptr,
    index_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    count,
    rows_stride,
    weight_stride,
    size,
    labels,
    mean,
    sigma,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.arange(0, BLOCK_C)
    sources = places
    if index_ptr is not None:
        sources = tl.load(index_ptr + places, mask=places < count, other=0).to(tl.int64)
    logits = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, size, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = columns < size
        rows = tl.load(
            rows_ptr + sources[:, None] * rows_stride + columns[None, :],
            mask=(places < count)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(
            weight_ptr + label[:, None] * weight_stride + columns[None, :],
            mask=(label < labels)[:, None] & inside[None, :],
            other=0.0,
        )
        logits += tl.sum(rows[:, None, :] * weight[None, :, :], axis=2)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + label, mask=label < labels, other=0.0)[None, :]
    scores = (logits - mean) / sigma
    if ACTIVATION == "sigmoid":
        scores = tl.sigmoid(scores)
    elif ACTIVATION == "tanh":
        scores = 2.0 * tl.sigmoid(2.0 * scores) - 1.0
    elif ACTIVATION == "relu":
        scores = tl.where(scores < 0.0, 0.0, scores)  # a maximum would make a number of NaN
    elif ACTIVATION == "gelu":
        scores = 0.5 * scores * (1.0 + tl.erf(scores * 0.7071067811865476))
    elif ACTIVATION == "silu":
        scores = scores * tl.sigmoid(scores)
    elif ACTIVATION == "softmax":
        scores = tl.where((label < labels)[None, :], scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    mask = (places < count)[:, None] & (label < labels)[None, :]
    tl.store(out_ptr + places[:, None] * labels + label[None, :], scores, mask=mask)


def score_head(
    rows_TD: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    index_N: torch.Tensor | None,
    *,
    mean: float,
    sigma: float,
    activation: str,
) -> torch.Tensor:
    """`[N or T, C]`; arguments as for the public function."""
    rows_TD, weight_CD = with_plain_rows(rows_TD), with_plain_rows(weight_CD)
    count = len(rows_TD) if index_N is None else len(index_N)
    labels, size = weight_CD.shape
    out_NC = torch.empty(count, labels, dtype=torch.float32, device=rows_TD.device)
    block_c = next_power_of_two(labels)
    if count > 0:
        block_n = max(1, min(8, _TILE // (block_c * _COLUMNS)))
        score_head_kernel[(triton.cdiv(count, block_n),)](
            rows_TD,
            None if index_N is None else index_N.contiguous(),
            weight_CD,
            None if bias_C is None else bias_C.contiguous(),
            out_NC,
            count,
            rows_TD.stride(0),
            weight_CD.stride(0),
            size,
            labels,
            float(mean),
            float(sigma),
            ACTIVATION=activation,
            BLOCK_N=block_n,
            BLOCK_C=block_c,
            BLOCK_D=_COLUMNS,
            num_warps=4,
        )
    return out_NC

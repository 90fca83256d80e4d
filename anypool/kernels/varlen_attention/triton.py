"""`varlen_attention` for GPUs: an online softmax over tiles of keys (Dao et al., arXiv:2205.14135).

A program has one head of one sequence and a block of its queries. It first passes over the keys of the prefix, if
there is one, through the sequence's block table, then over the sequence's own keys. Tiles that no query of the block
sees are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows
from anypool.kernels.varlen_attention.paged import PagedKeys


@triton.jit
def _tanh(x):
    """Through the sigmoid; near 0, where that loses digits, by its series, as far as float32 goes."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.03, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _fold(
    acc,
    total,
    most,
    q,
    k,
    v,
    query,
    key,
    key_end,
    scale,
    softcap,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Folds a tile of keys, at the positions `key`, into the running sum of values, sum of weights and maximum."""
    dtype = v.dtype
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    scores *= 1.4426950408889634  # log2(e): exp2 is what GPUs have
    visible = (key < key_end)[None, :]
    if LEFT >= 0:
        visible = visible & (key[None, :] >= query[:, None] - LEFT)
    if RIGHT >= 0:
        visible = visible & (key[None, :] <= query[:, None] + RIGHT)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a query may see nothing of what came so far
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(most - level)
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + tl.dot(weights.to(dtype).to(v.dtype), v, input_precision="ieee")
    return acc, total, higher


@triton.jit
def varlen_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_seqlens_ptr,
    sinks_ptr,
    prefix_k_ptr,
    prefix_v_ptr,
    tables_ptr,
    prefix_lengths_ptr,
    key_lengths_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    prefix_k_slot_stride,
    prefix_k_head_stride,
    prefix_v_slot_stride,
    prefix_v_head_stride,
    tables_stride,
    scale,
    softcap,
    SHARE: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * BLOCK_M
    if first >= length:
        return
    before = 0
    if prefix_lengths_ptr is not None:
        before = tl.load(prefix_lengths_ptr + sequence)
    group = head // SHARE
    column_k, column_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    inside_k, inside_v = (column_k < SIZE_K)[None, :], (column_v < SIZE_V)[None, :]
    rows = first + tl.arange(0, BLOCK_M)
    query = before + rows
    q = tl.load(
        q_ptr + (begin + rows)[:, None] * q_token_stride + head * q_head_stride + column_k[None, :],
        mask=(rows < length)[:, None] & inside_k,
        other=0.0,
    )

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks_ptr is not None:  # a score that has been seen, of a value that is zero
        most = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    if prefix_lengths_ptr is not None:
        lowest = 0
        if LEFT >= 0:
            lowest = tl.maximum(before + first - LEFT, 0) // BLOCK_N * BLOCK_N
        for start in range(lowest, before, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            there = key < before
            block = tl.load(tables_ptr + sequence * tables_stride + key // BLOCK_SIZE, mask=there, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            k = tl.load(
                prefix_k_ptr + slot[:, None] * prefix_k_slot_stride + group * prefix_k_head_stride + column_k[None, :],
                mask=there[:, None] & inside_k,
                other=0.0,
            )
            v = tl.load(
                prefix_v_ptr + slot[:, None] * prefix_v_slot_stride + group * prefix_v_head_stride + column_v[None, :],
                mask=there[:, None] & inside_v,
                other=0.0,
            )
            acc, total, most = _fold(
                acc, total, most, q, k, v, query, key, before, scale, softcap, LEFT, RIGHT, SOFTCAP, UPCAST
            )

    keys = length
    if key_lengths_ptr is not None:
        keys = tl.load(key_lengths_ptr + sequence)
    lowest, highest = 0, keys
    if LEFT >= 0:
        lowest = tl.maximum(first - LEFT, 0) // BLOCK_N * BLOCK_N
    if RIGHT >= 0:
        highest = tl.minimum(first + BLOCK_M + RIGHT, keys)
    for start in range(lowest, highest, BLOCK_N):
        own = start + tl.arange(0, BLOCK_N)
        there = (own < keys)[:, None]
        token = (begin + own)[:, None]
        k = tl.load(
            k_ptr + token * k_token_stride + group * k_head_stride + column_k[None, :],
            mask=there & inside_k,
            other=0.0,
        )
        v = tl.load(
            v_ptr + token * v_token_stride + group * v_head_stride + column_v[None, :],
            mask=there & inside_v,
            other=0.0,
        )
        acc, total, most = _fold(
            acc,
            total,
            most,
            q,
            k,
            v,
            query,
            before + own,
            before + keys,
            scale,
            softcap,
            LEFT,
            RIGHT,
            SOFTCAP,
            UPCAST,
        )

    total = tl.where(total == 0.0, 1.0, total)  # rows that saw nothing
    out = acc / total[:, None]
    tl.store(
        out_ptr + (begin + rows)[:, None] * out_token_stride + head * out_head_stride + column_v[None, :],
        out,
        mask=(rows < length)[:, None] & inside_v,
    )


def varlen_attention(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGV: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    prefix: PagedKeys | None,
    key_lengths_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[T, H, V]`; arguments as for the public function."""
    q_THK, k_TGK, v_TGV = map(with_plain_rows, (q_THK, k_TGK, v_TGV))
    tokens, heads, size_k = q_THK.shape
    size_v = v_TGV.shape[2]
    out_THV = torch.empty(tokens, heads, size_v, dtype=q_THK.dtype, device=q_THK.device)
    block_k, block_v = max(16, next_power_of_two(size_k)), max(16, next_power_of_two(size_v))
    block_m, block_n, warps, stages = _tiles(max(block_k, block_v), q_THK.element_size())
    block_m = min(block_m, max(16, next_power_of_two(max_length)))
    prefix_k, prefix_v = (None, None) if prefix is None else (prefix.k_SGK, prefix.v_SGV)
    if tokens > 0:
        varlen_attention_kernel[(triton.cdiv(max_length, block_m), len(cu_seqlens) - 1, heads)](
            q_THK,
            k_TGK,
            v_TGV,
            out_THV,
            cu_seqlens,
            sinks_H,
            prefix_k,
            prefix_v,
            None if prefix is None else prefix.tables_NB,
            None if prefix is None else prefix.lengths_N,
            key_lengths_N,
            *_strides(q_THK),
            *_strides(k_TGK),
            *_strides(v_TGV),
            *_strides(out_THV),
            *_strides(prefix_k),
            *_strides(prefix_v),
            0 if prefix is None else prefix.tables_NB.stride(0),
            float(scale),
            1.0 if softcap is None else float(softcap),
            SHARE=heads // k_TGK.shape[1],
            SIZE_K=size_k,
            SIZE_V=size_v,
            LEFT=window[0],
            RIGHT=window[1],
            SOFTCAP=softcap is not None,
            UPCAST=q_THK.device.type == "cpu",  # the interpreter has no products of bfloat16
            BLOCK_SIZE=1 if prefix is None else prefix.block_size,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=warps,
            num_stages=stages,
        )
    return out_THV


def _tiles(block: int, element_size: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and pipeline stages, such that the tiles fit into 64 KiB of shared memory."""
    if element_size > 2:  # float32 is for exactness: it has no matrix units without loss
        return (32, 32, 4, 1) if block <= 128 else (16, 16, 4, 1)
    # Of the shapes that fit, those for which the compiler keeps most in registers.
    if block <= 64:
        return 128, 64, 8, 2
    return (128, 32, 8, 2) if block <= 128 else (64, 32, 8, 1)


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))

"""`maxsim_pairs` for GPUs: the matrix of dot products never leaves a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anypool.kernels.dispatch import next_power_of_two, with_plain_rows


@triton.jit
def maxsim_kernel(
    queries_ptr,
    cu_queries_ptr,
    documents_ptr,
    cu_documents_ptr,
    pairs_ptr,
    out_ptr,
    queries_stride,
    documents_stride,
    size,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pair = tl.program_id(0)
    query, document = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    query_begin, query_end = tl.load(cu_queries_ptr + query), tl.load(cu_queries_ptr + query + 1)
    begin, end = tl.load(cu_documents_ptr + document), tl.load(cu_documents_ptr + document + 1)
    score = 0.0
    for query_start in range(query_begin, query_end, BLOCK_Q):
        row = query_start + tl.arange(0, BLOCK_Q)
        most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        nans = tl.zeros([BLOCK_Q], tl.int32)
        for start in range(begin, end, BLOCK_D):
            token = start + tl.arange(0, BLOCK_D)
            products = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            for column_start in range(0, size, BLOCK_E):
                column = column_start + tl.arange(0, BLOCK_E)
                inside = column < size
                q = tl.load(
                    queries_ptr + row.to(tl.int64)[:, None] * queries_stride + column[None, :],
                    mask=(row < query_end)[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                d = tl.load(
                    documents_ptr + token.to(tl.int64)[:, None] * documents_stride + column[None, :],
                    mask=(token < end)[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                products += tl.dot(q, tl.trans(d), input_precision="ieee")
            products = tl.where((token < end)[None, :], products, float("-inf"))
            nans += tl.sum((products != products).to(tl.int32), axis=1)  # a maximum passes over NaN
            most = tl.maximum(most, tl.max(products, axis=1))
        most = tl.where(nans > 0, float("nan"), most)
        score += tl.sum(tl.where(row < query_end, most, 0.0), axis=0)
    tl.store(out_ptr + pair, score)


def maxsim_pairs(
    queries_QE: torch.Tensor,
    cu_queries: torch.Tensor,
    documents_DE: torch.Tensor,
    cu_documents: torch.Tensor,
    pairs_P2: torch.Tensor,
) -> torch.Tensor:
    """`[P]`; arguments as for the public function."""
    queries_QE, documents_DE = with_plain_rows(queries_QE), with_plain_rows(documents_DE)
    out_P = torch.empty(len(pairs_P2), dtype=torch.float32, device=queries_QE.device)
    size = queries_QE.shape[1]
    if len(pairs_P2) > 0:
        maxsim_kernel[(len(pairs_P2),)](
            queries_QE,
            cu_queries,
            documents_DE,
            cu_documents,
            pairs_P2.contiguous(),
            out_P,
            queries_QE.stride(0),
            documents_DE.stride(0),
            size,
            BLOCK_Q=32,
            BLOCK_D=64,
            BLOCK_E=max(16, min(32, next_power_of_two(size))),
            num_warps=4,
        )
    return out_P

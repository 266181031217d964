"""The gradients of keys and values, for `attention_backward.py`.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension, S = segments + 1
entries of `cu_seqlens`, P programs.

A program takes one key/value head of one tile of one document, and passes over the queries that see
the tile, one query head of the group after the other: one loop of all, which needs the fewest
registers.
"""

import triton
import triton.language as tl

from sparkgpt.ops.kernels.attention_tiles import locate, store_head


@triton.jit(do_not_specialize=["segments"])
def attention_backward_keys(
    dout_TNH, q_TNH, k_TKH, v_TKH, lse_NT, delta_NT, cu_S, x_TKH, gain_H, cos_TH, sin_TH,
    dk_TKH, dv_TKH, shares_PH, k_stride, v_stride, x_stride, dk_stride, dv_stride, T, segments,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, FUSED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(KEYS % QUERIES == 0)
    head = tl.program_id(0) % K
    # From the first tile of each document, which the most queries see, to its last.
    start, length, first = locate(cu_S, segments, tl.program_id(0) // K, KEYS)
    row = tl.arange(0, KEYS)
    position = first + row
    inside = position < length
    at = start + first
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, H)[None, :]
    rows = query[:, None] * (N * H) + column
    k_at = k_TKH + at * k_stride + head * H
    k = tl.load(k_at + (row[:, None] * k_stride + column), mask=inside[:, None], other=0.0)
    v_at = v_TKH + at * v_stride + head * H
    v = tl.load(v_at + (row[:, None] * v_stride + column), mask=inside[:, None], other=0.0)
    dk = tl.zeros((KEYS, H), tl.float32)
    dv = tl.zeros((KEYS, H), tl.float32)
    blocks = tl.cdiv(length - first, QUERIES)
    for step in range(0, N // K * blocks):
        query_head = head * (N // K) + step // blocks
        block = first + step % blocks * QUERIES
        row_at = ((start + block) * N + query_head) * H
        statistics_at = query_head.to(tl.int64) * T + start + block
        present = block + query < length
        q = tl.load(q_TNH + row_at + rows, mask=present[:, None], other=0.0)
        dout = tl.load(dout_TNH + row_at + rows, mask=present[:, None], other=0.0)
        # A query beyond the segment weighs exp(-inf) = 0.
        lse = tl.load(lse_NT + statistics_at + query, mask=present, other=float("inf"))
        delta = tl.load(delta_NT + statistics_at + query, mask=present, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        weights = tl.exp2(scores * SCALE - lse[None, :])
        weights = tl.where(position[:, None] <= block + query[None, :], weights, 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        dweights = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
        dk = tl.dot(dscores, q, dk, input_precision="ieee")
    low, high = tl.split(tl.permute(tl.reshape(dk, (KEYS, 2, H // 2)), (0, 2, 1)))
    dv_at = dv_TKH + at * dv_stride + head * H + (row[:, None] * dv_stride + column)
    tl.store(dv_at, dv.to(dv_TKH.dtype.element_ty), mask=inside[:, None])
    store_head(
        low, high, dk_TKH, dk_stride, x_TKH, x_stride, gain_H, cos_TH, sin_TH, shares_PH,
        at, head, length - first, H, EPS, FUSED, KEYS,
    )  # fmt: skip

"""The gradient of queries, for `attention_backward.py`.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension, S = segments + 1
entries of `cu_seqlens`, P programs.

As the forward: a program takes one query head of one tile of one document, and passes over the keys
that the tile sees. Heads are held as their two halves, which the epilogue's rotation wants apart.
"""

import triton
import triton.language as tl

from sparkgpt.ops.kernels.attention_tiles import load_tile, query_tile, store_head


@triton.jit
def _query_gradients(
    dq_low,
    dq_high,
    q_low,
    q_high,
    dout,
    lse,
    delta,
    k_rows,
    v_rows,
    k_stride,
    v_stride,
    position,
    length,
    begin,
    end,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from `begin` to `end`, where `k_rows` and `v_rows` point."""
    key = tl.arange(0, KEYS)[:, None]
    half = tl.arange(0, H // 2)[None, :]
    column = tl.arange(0, H)[None, :]
    for block in range(begin, end, KEYS):
        inside = block + tl.arange(0, KEYS) < length
        k_low = load_tile(k_rows + key * k_stride + half, inside, MASKED)
        k_high = load_tile(k_rows + H // 2 + key * k_stride + half, inside, MASKED)
        v = load_tile(v_rows + key * v_stride + column, inside, MASKED)
        k_rows += KEYS * k_stride
        v_rows += KEYS * v_stride
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
        weights = tl.exp2(scores * SCALE - lse[:, None])
        if MASKED:
            seen = block + tl.arange(0, KEYS)[None, :] <= position[:, None]
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dscores = (weights * (dweights - delta[:, None])).to(k_low.dtype)
        dq_low = tl.dot(dscores, k_low, dq_low, input_precision="ieee")
        dq_high = tl.dot(dscores, k_high, dq_high, input_precision="ieee")
    return dq_low, dq_high


@triton.jit(do_not_specialize=["segments"])
def attention_backward_queries(
    dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S, x_TNH, gain_H, cos_TH, sin_TH,
    dq_TNH, delta_NT, shares_PH, k_stride, v_stride, x_stride, dq_stride, T, segments,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, FUSED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(QUERIES % KEYS == 0)
    head, start, length, first = query_tile(cu_S, T, segments, N, QUERIES)
    row = tl.arange(0, QUERIES)
    position = first + row
    inside = position < length
    at = start + first
    half = tl.arange(0, H // 2)[None, :]
    column = tl.arange(0, H)[None, :]
    row_at = (at * N + head) * H
    rows = row[:, None] * (N * H)
    dout = tl.load(dout_TNH + row_at + (rows + column), mask=inside[:, None], other=0.0)
    out = tl.load(out_TNH + row_at + (rows + column), mask=inside[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    statistics_at = head.to(tl.int64) * T + at
    tl.store(delta_NT + statistics_at + row, delta, mask=inside)
    lse = tl.load(lse_NT + statistics_at + row, mask=inside, other=0.0)
    q_low = tl.load(q_TNH + row_at + (rows + half), mask=inside[:, None], other=0.0)
    q_high = tl.load(q_TNH + row_at + (rows + half + H // 2), mask=inside[:, None], other=0.0)
    k_rows = k_TKH + start * k_stride + head // (N // K) * H
    v_rows = v_TKH + start * v_stride + head // (N // K) * H
    low = tl.zeros((QUERIES, H // 2), tl.float32)
    high = tl.zeros((QUERIES, H // 2), tl.float32)
    full = tl.where(first < length, first, 0)
    end = tl.minimum(first + QUERIES, length)
    low, high = _query_gradients(
        low, high, q_low, q_high, dout, lse, delta, k_rows, v_rows, k_stride, v_stride,
        position, length, 0, full, SCALE, H, KEYS, False,
    )  # fmt: skip
    k_rows += first.to(tl.int64) * k_stride
    v_rows += first.to(tl.int64) * v_stride
    low, high = _query_gradients(
        low, high, q_low, q_high, dout, lse, delta, k_rows, v_rows, k_stride, v_stride,
        position, length, first, end, SCALE, H, KEYS, True,
    )  # fmt: skip
    store_head(
        low, high, dq_TNH, dq_stride, x_TNH, x_stride, gain_H, cos_TH, sin_TH, shares_PH,
        at, head, length - first, H, EPS, FUSED, QUERIES,
    )  # fmt: skip

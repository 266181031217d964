"""Gradients of attention over packed documents: one kernel for queries, one for keys and values.

Shapes: T packed positions, N query heads, K key/value heads, A = N + 2K rows of a position, H head
dimension, S = segments + 1 entries of `cu_seqlens`, P programs.

Each output row belongs to one program, which adds in a fixed order: the same bits twice, no atomics
and nothing to fill with zeros. A key's program goes over the queries of its whole group. The
queries' kernel runs first and leaves, per output row, delta = out . dout for the keys' kernel.
Fused with norm and RoPE, both end by turning their rows' gradients back, in registers, and write
into the gradient of qkv; each program's share of the gains' is added up later, in a fixed order.

Per layer as in `attention.py` (T = 49,152, L = 3,000, N, K, H = 4, 2, 128, bf16):

    FLOPs  queries 3 products, keys and values 4: 14 N H a pair     528 G    5.8 ms at 91 TFLOP/s
    bytes  queries (4 N + 2 K) H elements a position, keys and
           values (2 N + 4 K) H                                     453 MB   2.1 ms at 220 GB/s
    fused  (2 N + 4 K) H less than with `qk_rope`'s backward
           after it, which reads and writes all three again        -201 MB  -0.9 ms

One pass would do with 5 products, but must add to float32 rows of dq from many programs: 8 bytes
read and written an element, L / 2 / KEYS times, 2.4 GB at KEYS = 128. Where that misses L2 it
takes 11 ms, and in a fixed order it can't run in parallel; the 2 products more take 1.7 ms. Fused,
this should be ahead of any attention whose norm and RoPE are apart; plain it is even at best.

SASS for sm_121: HMMA.16816 in bf16, global to shared by LDGSTS of 16 bytes, the epilogue's x and
tables by 8 or 16; 180 to 254 registers, 24 to 96 KB, no stack, fused or not. Keys and values at
H = 128 in tiles of 128 with 8 warps want two registers too many, hence 64 with 4, two a
multiprocessor.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.attention_tiles import (
    CANDIDATES,
    check,
    constants,
    default_config,
    load_tile,
    locate,
    programs,
    signature,
)
from sparkgpt.ops.kernels.qk_rope import (
    load_gain,
    load_halves,
    load_tables,
    norm_rope_backward,
    store_halves,
    token_rows,
)
from sparkgpt.ops.kernels.specimen import Config, Specimen


@triton.jit
def _store_head(
    low,
    high,
    grad_at,
    grad_stride,
    x_at,
    x_stride,
    gain_H,
    cos_at,
    sin_at,
    shares_at,
    rows_left,
    H: tl.constexpr,
    EPS: tl.constexpr,
    FUSED: tl.constexpr,
    B: tl.constexpr,
):
    """Write the gradient of a head's rows: as it is, or of what they were before norm and RoPE."""
    row = tl.arange(0, B)
    column = tl.arange(0, H // 2)
    mask = (row < rows_left)[:, None]
    if FUSED:
        # Rows beyond the segment are zeros in x and in both halves, and add nothing to the shares.
        gain_low, gain_high = load_gain(gain_H, column, H // 2)
        cos, sin = load_tables(cos_at, sin_at, row, column, mask, H)
        x_low, x_high = load_halves(x_at + row[:, None] * x_stride, column, mask, H // 2)
        low, high, share_low, share_high = norm_rope_backward(
            low, high, x_low, x_high, gain_low, gain_high, cos, sin, H, EPS
        )
        tl.store(shares_at + column, tl.sum(share_low, axis=0))
        tl.store(shares_at + H // 2 + column, tl.sum(share_high, axis=0))
    store_halves(grad_at + row[:, None] * grad_stride, column, mask, low, high, H // 2)


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
def _attention_backward_queries(
    dout_TNH,
    q_TNH,
    k_TKH,
    v_TKH,
    out_TNH,
    lse_NT,
    cu_S,
    x_TNH,
    gain_H,
    cos_TH,
    sin_TH,
    dq_TNH,
    delta_NT,
    shares_PH,
    k_stride,
    v_stride,
    x_stride,
    dq_stride,
    T,
    segments,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    FUSED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    tl.static_assert(QUERIES % KEYS == 0)
    head = tl.program_id(0) % N
    slot = T // QUERIES + segments - 1 - tl.program_id(0) // N
    start, length, first = locate(cu_S, segments, slot, QUERIES)
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
    _store_head(
        low * (H**-0.5),
        high * (H**-0.5),
        dq_TNH + at * dq_stride + head * H,
        dq_stride,
        x_TNH + at * x_stride + head * H,
        x_stride,
        gain_H,
        cos_TH + at * H,
        sin_TH + at * H,
        shares_PH + tl.program_id(0).to(tl.int64) * H,
        length - first,
        H,
        EPS,
        FUSED,
        QUERIES,
    )


@triton.jit(do_not_specialize=["segments"])
def _attention_backward_keys(
    dout_TNH,
    q_TNH,
    k_TKH,
    v_TKH,
    lse_NT,
    delta_NT,
    cu_S,
    x_TKH,
    gain_H,
    cos_TH,
    sin_TH,
    dk_TKH,
    dv_TKH,
    shares_PH,
    k_stride,
    v_stride,
    x_stride,
    dk_stride,
    dv_stride,
    T,
    segments,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    FUSED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
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
    _store_head(
        low * (H**-0.5),
        high * (H**-0.5),
        dk_TKH + at * dk_stride + head * H,
        dk_stride,
        x_TKH + at * x_stride + head * H,
        x_stride,
        gain_H,
        cos_TH + at * H,
        sin_TH + at * H,
        shares_PH + tl.program_id(0).to(tl.int64) * H,
        length - first,
        H,
        EPS,
        FUSED,
        KEYS,
    )


class Normed(NamedTuple):
    """What q and k were before norm and RoPE, with all that turns their gradients back."""

    q_TNH: Tensor
    k_TKH: Tensor
    q_gain_H: Tensor
    k_gain_H: Tensor
    cos_TH: Tensor
    sin_TH: Tensor
    eps: float


def backward(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    cu_S: Tensor,
    configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output; `out` and `lse` as the forward gave them."""
    check(q_TNH)
    like = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grads = like(q_TNH), like(k_TKH), like(v_TKH)
    _launch(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S, grads, None, configs)
    return grads


def fused_backward(
    dout_TNH: Tensor,
    qkv_TAH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    gains: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    cu_S: Tensor,
    eps: float,
    configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv (T, A, H) and of both gains (H,), q's and k's never in memory."""
    check(q_TNH)
    kv_heads = k_TKH.shape[1]
    split = lambda x_TAH: x_TAH.split((q_TNH.shape[1], kv_heads, kv_heads), 1)
    dqkv_TAH = torch.empty_like(qkv_TAH)
    raw_q_TNH, raw_k_TKH, v_TKH = split(qkv_TAH)
    normed = Normed(raw_q_TNH, raw_k_TKH, *gains, *tables, eps)
    saved = (q_TNH, k_TKH, v_TKH, out_TNH, lse_NT)
    shares = _launch(dout_TNH, *saved, cu_S, split(dqkv_TAH), normed, configs)
    return dqkv_TAH, shares[0].sum(0), shares[1].sum(0)


def _launch(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S, grads, normed, configs):
    """Queries first: their kernel writes what both need of each output row. Returns the gains'
    shares, one row a program, if `normed`."""
    tokens, heads, head_dim = q_TNH.shape
    kv_heads, segments = k_TKH.shape[1], cu_S.shape[0] - 1
    queries, keys = configs or (default_config(name, head_dim) for name in ("queries", "keys"))
    counts = (
        programs(tokens, segments, queries.tiles["QUERIES"], heads),
        programs(tokens, segments, keys.tiles["KEYS"], kv_heads),
    )
    wide = {"dtype": torch.float32, "device": q_TNH.device}
    delta_NT = torch.empty(heads, tokens, **wide)
    shares = [torch.empty(n if normed else 0, head_dim, **wide) for n in counts]
    common = constants(heads, kv_heads, head_dim)
    common |= {"EPS": normed.eps if normed else 0.0, "FUSED": normed is not None}
    # Without a norm to turn back, any tensors will do in its arguments' places.
    x = normed or Normed(q_TNH, k_TKH, lse_NT, lse_NT, q_TNH, q_TNH, 0.0)
    dout_TNH, q_TNH = dout_TNH.contiguous(), q_TNH.contiguous()
    k_TKH, v_TKH = token_rows(k_TKH), token_rows(v_TKH)
    dq_TNH, dk_TKH, dv_TKH = grads
    _attention_backward_queries[(counts[0],)](
        dout_TNH,
        q_TNH,
        k_TKH,
        v_TKH,
        out_TNH,
        lse_NT,
        cu_S,
        x.q_TNH,
        x.q_gain_H,
        x.cos_TH,
        x.sin_TH,
        dq_TNH,
        delta_NT,
        shares[0],
        *(tensor.stride(0) for tensor in (k_TKH, v_TKH, x.q_TNH, dq_TNH)),
        tokens,
        segments,
        **common,
        **queries.options,
    )
    _attention_backward_keys[(counts[1],)](
        dout_TNH,
        q_TNH,
        k_TKH,
        v_TKH,
        lse_NT,
        delta_NT,
        cu_S,
        x.k_TKH,
        x.k_gain_H,
        x.cos_TH,
        x.sin_TH,
        dk_TKH,
        dv_TKH,
        shares[1],
        *(tensor.stride(0) for tensor in (k_TKH, v_TKH, x.k_TKH, dk_TKH, dv_TKH)),
        tokens,
        segments,
        **common,
        **keys.options,
    )
    return shares


def specimens(heads: int, kv_heads: int, head_dim: int) -> list[Specimen]:
    """Both kernels, each plain and fused."""
    found = []
    kernels = {"queries": _attention_backward_queries, "keys": _attention_backward_keys}
    for name, kernel in kernels.items():
        for fused in (False, True):
            values = constants(heads, kv_heads, head_dim) | {"EPS": 1e-6, "FUSED": fused}
            for config in CANDIDATES[name, head_dim]:
                found.append(Specimen(kernel, signature(kernel), values, config))
    return found

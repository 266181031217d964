"""Causal attention of packed documents, each to itself alone; queries in groups per key/value head.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension, S = segments + 1
entries of `cu_seqlens`.

A program takes one query head of one tile of one document, found on the device, and passes once
over the keys that the tile sees: online softmax, in float32, products on tensor cores.

Per layer of 49,152 positions in documents of L = 3,000 (N, K, H = 4, 2, 128, bf16), T L / 2 pairs:

    FLOPs  2 products, 4 N H a pair                       151 G    1.7 ms at 91 TFLOP/s
    bytes  (2 N + 2 K) H elements and 4 N a position      152 MB   0.7 ms at 220 GB/s

1,000 FLOPs a byte, twice the ridge of 445, so the tensor cores decide, and tiles of 128 queries
keep what is read from L2 at 8 bytes a clock per multiprocessor. The same counts hold for any
kernel of this kind, flash-attn's too: the forward can match it, no more. What puts our own ahead
is in the backward (`attention_backward.py`), and that nothing around it splits or copies qkv.

SASS for sm_121: HMMA.16816 in bf16, global to shared by LDGSTS of 16 bytes, rows out by 16 bytes;
at most 220 registers and 64 KB, no stack. Tiles of 128 x 64 at H = 128 spill, so none is here, and
float32 is refused on CUDA: without tensor cores even 16 x 16 tiles spill in the backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels import attention_backward
from sparkgpt.ops.kernels.attention_tiles import (
    CANDIDATES,
    check,
    constants,
    default_config,
    load_tile,
    programs,
    query_tile,
    signature,
)
from sparkgpt.ops.kernels.qk_rope import token_rows
from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "attention"


@triton.jit
def _attend(
    acc,
    total,
    top,
    q,
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
    """Online softmax over the keys from `begin` to `end`; `top` in the scores' own unit.

    `k_rows` and `v_rows` point at key `begin`.
    """
    key = tl.arange(0, KEYS)[:, None]
    column = tl.arange(0, H)[None, :]
    for block in range(begin, end, KEYS):
        inside = block + tl.arange(0, KEYS) < length
        k = load_tile(k_rows + key * k_stride + column, inside, MASKED)
        v = load_tile(v_rows + key * v_stride + column, inside, MASKED)
        k_rows += KEYS * k_stride
        v_rows += KEYS * v_stride
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = block + tl.arange(0, KEYS)[None, :] <= position[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores * SCALE - (new_top * SCALE)[:, None])
        fade = tl.exp2((top - new_top) * SCALE)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["segments"])
def _attention_forward(
    q_TNH,
    k_TKH,
    v_TKH,
    cu_S,
    out_TNH,
    lse_NT,
    k_stride,
    v_stride,
    T,
    segments,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    tl.static_assert(QUERIES % KEYS == 0)
    head, start, length, first = query_tile(cu_S, T, segments, N, QUERIES)
    row = tl.arange(0, QUERIES)
    position = first + row
    inside = position < length
    tile = row[:, None] * (N * H) + tl.arange(0, H)[None, :]
    row_at = ((start + first) * N + head) * H
    q = tl.load(q_TNH + row_at + tile, mask=inside[:, None], other=0.0)
    k_rows = k_TKH + start * k_stride + head // (N // K) * H
    v_rows = v_TKH + start * v_stride + head // (N // K) * H
    acc = tl.zeros((QUERIES, H), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    full = tl.where(first < length, first, 0)
    end = tl.minimum(first + QUERIES, length)
    acc, total, top = _attend(
        acc, total, top, q, k_rows, v_rows, k_stride, v_stride, position, length, 0, full,
        SCALE, H, KEYS, False,
    )  # fmt: skip
    k_rows += first.to(tl.int64) * k_stride
    v_rows += first.to(tl.int64) * v_stride
    acc, total, top = _attend(
        acc, total, top, q, k_rows, v_rows, k_stride, v_stride, position, length, first, end,
        SCALE, H, KEYS, True,
    )  # fmt: skip
    total = tl.where(inside, total, 1.0)
    out = (acc / total[:, None]).to(out_TNH.dtype.element_ty)
    tl.store(out_TNH + row_at + tile, out, mask=inside[:, None])
    lse = top * SCALE + tl.log2(total)
    tl.store(lse_NT + head.to(tl.int64) * T + (start + first) + row, lse, mask=inside)


def forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_S: Tensor, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Output (T, N, H) in q's dtype, and float32 (N, T) base-2 logarithms of the softmax's sums.

    H 64 or 128; on CUDA bfloat16 alone; `cu_S` as in `varlen_attention`.
    """
    check(q_TNH)
    tokens, heads, head_dim = q_TNH.shape
    config = config or default_config("forward", head_dim)
    q_TNH, k_TKH, v_TKH = q_TNH.contiguous(), token_rows(k_TKH), token_rows(v_TKH)
    out_TNH = torch.empty_like(q_TNH)
    lse_NT = torch.empty(heads, tokens, dtype=torch.float32, device=q_TNH.device)
    segments = cu_S.shape[0] - 1
    _attention_forward[(programs(tokens, segments, config.tiles["QUERIES"], heads),)](
        q_TNH,
        k_TKH,
        v_TKH,
        cu_S,
        out_TNH,
        lse_NT,
        k_TKH.stride(0),
        v_TKH.stride(0),
        tokens,
        segments,
        **constants(heads, k_TKH.shape[1], head_dim),
        **config.options,
    )
    return out_TNH, lse_NT


def specimens() -> list[Specimen]:
    """Every candidate at one shape of each head dimension, the defaults at the largest shape too;
    the backward's plain and fused."""
    found = []
    for shape, count in (((4, 2, 128), None), ((8, 4, 64), None), ((16, 8, 128), 1)):
        types, values = signature(_attention_forward), constants(*shape)
        for config in CANDIDATES["forward", shape[2]][:count]:
            found.append(Specimen(_attention_forward, types, values, config))
        found += attention_backward.specimens(shape, count)
    return found

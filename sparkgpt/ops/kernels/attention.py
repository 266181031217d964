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

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.config import ModelConfig
from sparkgpt.ops.choices import shape_text
from sparkgpt.ops.kernels import attention_backward, qk_rope
from sparkgpt.ops.kernels.attention_backward import Normed, Saved, launch_keys, launch_queries
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
from sparkgpt.ops.kernels.inputs import document_ends, normal
from sparkgpt.ops.kernels.qk_rope import token_rows
from sparkgpt.ops.kernels.specimen import Config, Specimen, Tunable

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


class Inputs(NamedTuple):
    """What attention's kernels read, k and v in the memory that training has them in."""

    saved: Saved
    normed: Normed
    qkv_TAH: Tensor
    delta_NT: Tensor

    def split(self, x_TAH: Tensor) -> tuple[Tensor, ...]:
        """Views of queries, keys and values."""
        heads, kv_heads = self.saved.q_TNH.shape[1], self.saved.k_TKH.shape[1]
        return x_TAH.split((heads, kv_heads, kv_heads), 1)


@functools.lru_cache(maxsize=1)  # the kernels of a shape share them, and the next shape frees them
def _inputs(shape: tuple[int, int, int], positions: int, longest: int, eps: float, device):
    heads, kv_heads, head_dim = shape
    split = heads, kv_heads, kv_heads
    shapes = (sum(split), head_dim), (heads, head_dim), (head_dim // 2,)
    qkv_TAH, dout_TNH, angle_TC = normal(device, *((positions, *rest) for rest in shapes))
    tables = angle_TC.cos().repeat(1, 2), angle_TC.sin().repeat(1, 2)
    gain_H = torch.ones(head_dim, device=device)
    raw_q_TNH, raw_k_TKH, v_TKH = qkv_TAH.split(split, 1)
    qk = qk_rope.forward(qkv_TAH, gain_H, gain_H, *tables, kv_heads, eps)
    cu_S = document_ends(positions, longest, device)
    saved = Saved(dout_TNH, *qk, v_TKH, *forward(*qk, v_TKH, cu_S), cu_S)
    delta_NT, _ = launch_queries(saved, torch.empty_like(qk[0]), None)
    normed = Normed(raw_q_TNH, raw_k_TKH, gain_H, gain_H, *tables, eps)
    return Inputs(saved, normed, qkv_TAH, delta_NT)


def _run_forward(x: Inputs, config: Config) -> tuple[Tensor, ...]:
    return forward(x.saved.q_TNH, x.saved.k_TKH, x.saved.v_TKH, x.saved.cu_S, config)


def _run_queries(x: Inputs, config: Config) -> tuple[Tensor, ...]:
    dq_TNH = torch.empty_like(x.saved.q_TNH)
    return dq_TNH, launch_queries(x.saved, dq_TNH, None, config)[0]


def _run_keys(x: Inputs, config: Config) -> tuple[Tensor, ...]:
    dk_TKH, dv_TKH = torch.empty_like(x.saved.k_TKH), torch.empty_like(x.saved.k_TKH)
    launch_keys(x.saved, x.delta_NT, dk_TKH, dv_TKH, None, config)
    return dk_TKH, dv_TKH


# A gain's gradient is compared as exactly as what it is summed from: products of rounded weights.
def _run_fused_queries(x: Inputs, config: Config) -> tuple[Tensor, ...]:
    dq_TNH = x.split(torch.empty_like(x.qkv_TAH))[0]
    delta_NT, shares_PH = launch_queries(x.saved, dq_TNH, x.normed, config)
    return dq_TNH, delta_NT, shares_PH.sum(0).to(dq_TNH.dtype)


def _run_fused_keys(x: Inputs, config: Config) -> tuple[Tensor, ...]:
    _, dk_TKH, dv_TKH = x.split(torch.empty_like(x.qkv_TAH))
    shares_PH = launch_keys(x.saved, x.delta_NT, dk_TKH, dv_TKH, x.normed, config)
    return dk_TKH, dv_TKH, shares_PH.sum(0).to(dk_TKH.dtype)


# Per kernel, as the operators name it: that of its candidates, and what it does in a layer.
TUNED = {
    "forward": ("forward", _run_forward),
    "queries": ("queries", _run_queries),
    "keys": ("keys", _run_keys),
    "fused_queries": ("queries", _run_fused_queries),
    "fused_keys": ("keys", _run_fused_keys),
}


def tunables(model: ModelConfig, positions: int, device: torch.device) -> list[Tunable]:
    """Every kernel at the model's heads, the backward's plain and fused with norm and RoPE."""
    shape = model.attention_heads, model.kv_heads, model.head_dim
    if ("forward", model.head_dim) not in CANDIDATES:
        return []
    sizes = shape, positions, model.max_position_embeddings, model.rms_norm_eps, device
    found = []
    for name, (kind, launch) in TUNED.items():
        candidates = CANDIDATES[kind, model.head_dim]
        run = lambda config, launch=launch: launch(_inputs(*sizes), config)
        key = FAMILY, shape_text(N=shape[0], K=shape[1], H=shape[2]), name
        found.append(Tunable(*key, default_config(kind, model.head_dim), candidates, run))
    return found

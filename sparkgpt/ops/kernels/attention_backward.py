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
tables by 8 or 16; 176 to 251 registers, 24 to 96 KB, no stack, fused or not. Keys and values at
H = 128 in tiles of 128 with 8 warps want two registers too many, hence 64 with 4, two a
multiprocessor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparkgpt.ops.kernels.attention_keys import attention_backward_keys
from sparkgpt.ops.kernels.attention_queries import attention_backward_queries
from sparkgpt.ops.kernels.attention_tiles import (
    CANDIDATES,
    check,
    constants,
    default_config,
    programs,
    signature,
)
from sparkgpt.ops.kernels.qk_rope import token_rows
from sparkgpt.ops.kernels.specimen import Config, Specimen

Chosen = tuple[Config | None, Config | None]  # of queries and of keys; None: the default


class Saved(NamedTuple):
    """What both kernels read; k's and v's positions may be strides apart."""

    dout_TNH: Tensor
    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    out_TNH: Tensor
    lse_NT: Tensor
    cu_S: Tensor


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
    configs: Chosen = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output; `out` and `lse` as the forward gave them."""
    check(q_TNH)
    like = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grads = like(q_TNH), like(k_TKH), like(v_TKH)
    _launch(Saved(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S), grads, None, configs)
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
    configs: Chosen = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv (T, A, H) and of both gains (H,), q's and k's never in memory."""
    check(q_TNH)
    kv_heads = k_TKH.shape[1]
    split = lambda x_TAH: x_TAH.split((q_TNH.shape[1], kv_heads, kv_heads), 1)
    dqkv_TAH = torch.empty_like(qkv_TAH)
    raw_q_TNH, raw_k_TKH, v_TKH = split(qkv_TAH)
    normed = Normed(raw_q_TNH, raw_k_TKH, *gains, *tables, eps)
    saved = Saved(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S)
    shares = _launch(saved, split(dqkv_TAH), normed, configs)
    return dqkv_TAH, shares[0].sum(0), shares[1].sum(0)


def _launch(saved: Saved, grads, normed: Normed | None, configs: Chosen) -> tuple[Tensor, Tensor]:
    """Queries first: their kernel writes what both need of each output row. Returns the gains'
    shares, one row a program, if `normed`."""
    dout_TNH, q_TNH, k_TKH, v_TKH, *rest = saved
    rows = token_rows(k_TKH), token_rows(v_TKH)
    saved = Saved(dout_TNH.contiguous(), q_TNH.contiguous(), *rows, *rest)
    delta_NT, q_shares_PH = launch_queries(saved, grads[0], normed, configs[0])
    return q_shares_PH, launch_keys(saved, delta_NT, *grads[1:], normed, configs[1])


def launch_queries(
    saved: Saved, dq_TNH: Tensor, normed: Normed | None, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Fill dq; returns delta (N, T) and the gain's shares, one row a program, if `normed`."""
    dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_S = saved
    tokens, heads, head_dim = q_TNH.shape
    segments = cu_S.shape[0] - 1
    config = config or default_config("queries", head_dim)
    count = programs(tokens, segments, config.tiles["QUERIES"], heads)
    delta_NT = torch.empty(heads, tokens, dtype=torch.float32, device=q_TNH.device)
    shares_PH, x = _shares(saved, count, normed), normed or _no_norm(saved)
    attention_backward_queries[(count,)](
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
        shares_PH,
        *(tensor.stride(0) for tensor in (k_TKH, v_TKH, x.q_TNH, dq_TNH)),
        tokens,
        segments,
        **_constants(saved, normed),
        **config.options,
    )
    return delta_NT, shares_PH


def launch_keys(
    saved: Saved,
    delta_NT: Tensor,
    dk_TKH: Tensor,
    dv_TKH: Tensor,
    normed: Normed | None,
    config: Config | None = None,
) -> Tensor:
    """Fill dk and dv; returns the gain's shares, one row a program, if `normed`."""
    dout_TNH, q_TNH, k_TKH, v_TKH, _, lse_NT, cu_S = saved
    tokens, kv_heads, head_dim = k_TKH.shape
    segments = cu_S.shape[0] - 1
    config = config or default_config("keys", head_dim)
    count = programs(tokens, segments, config.tiles["KEYS"], kv_heads)
    shares_PH, x = _shares(saved, count, normed), normed or _no_norm(saved)
    attention_backward_keys[(count,)](
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
        shares_PH,
        *(tensor.stride(0) for tensor in (k_TKH, v_TKH, x.k_TKH, dk_TKH, dv_TKH)),
        tokens,
        segments,
        **_constants(saved, normed),
        **config.options,
    )
    return shares_PH


def _shares(saved: Saved, count: int, normed: Normed | None) -> Tensor:
    q_TNH = saved.q_TNH
    shape = count if normed else 0, q_TNH.shape[2]
    return torch.empty(*shape, dtype=torch.float32, device=q_TNH.device)


def _no_norm(saved: Saved) -> Normed:
    """Without a norm to turn back, any tensors will do in its arguments' places."""
    q_TNH, lse_NT = saved.q_TNH, saved.lse_NT
    return Normed(q_TNH, saved.k_TKH, lse_NT, lse_NT, q_TNH, q_TNH, 0.0)


def _constants(saved: Saved, normed: Normed | None) -> dict[str, int | float]:
    _, heads, head_dim = saved.q_TNH.shape
    fused = {"EPS": normed.eps if normed else 0.0, "FUSED": normed is not None}
    return constants(heads, saved.k_TKH.shape[1], head_dim) | fused


def specimens(shape: tuple[int, int, int], count: int | None) -> list[Specimen]:
    """Both kernels, each plain and fused, in the first `count` configurations, for (N, K, H)."""
    found = []
    kernels = {"queries": attention_backward_queries, "keys": attention_backward_keys}
    for name, kernel in kernels.items():
        for fused in (False, True):
            values = constants(*shape) | {"EPS": 1e-6 if fused else 0.0, "FUSED": fused}
            for config in CANDIDATES[name, shape[2]][:count]:
                found.append(Specimen(kernel, signature(kernel), values, config))
    return found

"""What attention's kernels share: their tiles, and which tile of which document a program takes.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension, S = segments + 1
entries of `cu_seqlens`, B positions of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.qk_rope import (
    load_gain,
    load_halves,
    load_tables,
    norm_rope_backward,
    store_halves,
)
from sparkgpt.ops.kernels.specimen import Config

# Per kernel and head dimension: the default first, then what may take its place.
CANDIDATES = {
    ("forward", 128): (
        Config({"QUERIES": 128, "KEYS": 32}, num_warps=8, num_stages=3),
        Config({"QUERIES": 128, "KEYS": 32}, num_warps=8, num_stages=2),
        Config({"QUERIES": 64, "KEYS": 32}, num_warps=4, num_stages=2),
    ),
    ("forward", 64): (
        Config({"QUERIES": 128, "KEYS": 64}, num_warps=8, num_stages=2),
        Config({"QUERIES": 128, "KEYS": 64}, num_warps=8, num_stages=3),
        Config({"QUERIES": 64, "KEYS": 64}, num_warps=4, num_stages=2),
    ),
    ("queries", 128): (
        Config({"QUERIES": 128, "KEYS": 32}, num_warps=8, num_stages=2),
        Config({"QUERIES": 128, "KEYS": 32}, num_warps=8, num_stages=3),
    ),
    ("queries", 64): (
        Config({"QUERIES": 128, "KEYS": 64}, num_warps=8, num_stages=2),
        Config({"QUERIES": 64, "KEYS": 64}, num_warps=4, num_stages=2),
    ),
    ("keys", 128): (
        Config({"QUERIES": 16, "KEYS": 64}, num_warps=4, num_stages=2),
        Config({"QUERIES": 16, "KEYS": 64}, num_warps=4, num_stages=3),
    ),
    ("keys", 64): (
        Config({"QUERIES": 64, "KEYS": 128}, num_warps=8, num_stages=2),
        Config({"QUERIES": 32, "KEYS": 64}, num_warps=4, num_stages=2),
    ),
}


@triton.jit
def locate(cu_S, segments, slot, B: tl.constexpr):
    """Start and length of the segment of a slot, and its tile's first position in the segment.

    Segment i owns the slots from cu[i] // B + i on: at least as many as it has tiles, for
    floor((c + n) / B) + 1 - floor(c / B) >= ceil(n / B). A slot too many lies beyond the length.
    """
    low = 0
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.load(cu_S + middle) // B + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    start = tl.load(cu_S + low)
    length = tl.load(cu_S + low + 1) - start
    return start.to(tl.int64), length, (slot - start // B - low) * B


@triton.jit
def query_tile(cu_S, T, segments, N: tl.constexpr, B: tl.constexpr):
    """This program's query head, and `locate` of its tile."""
    # From the last tile of each document, which sees the most keys, to its first.
    slot = T // B + segments - 1 - tl.program_id(0) // N
    start, length, first = locate(cu_S, segments, slot, B)
    return tl.program_id(0) % N, start, length, first


@triton.jit
def load_tile(pointers, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_head(
    low, high, grad, grad_stride, x, x_stride, gain_H, cos_TH, sin_TH, shares_PH, at, head, rows,
    H: tl.constexpr, EPS: tl.constexpr, FUSED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a head's gradients, up to the scores' scale, of `rows` positions from `at` on: as they
    are, or turned back to what the rows were before norm and RoPE."""
    row = tl.arange(0, B)
    column = tl.arange(0, H // 2)
    mask = (row < rows)[:, None]
    low *= H**-0.5
    high *= H**-0.5
    if FUSED:
        # Rows beyond the segment are zeros in x and in both halves, and add nothing to the shares.
        gain_low, gain_high = load_gain(gain_H, column, H // 2)
        cos, sin = load_tables(cos_TH + at * H, sin_TH + at * H, row, column, mask, H)
        x_rows = x + at * x_stride + head * H + row[:, None] * x_stride
        x_low, x_high = load_halves(x_rows, column, mask, H // 2)
        low, high, share_low, share_high = norm_rope_backward(
            low, high, x_low, x_high, gain_low, gain_high, cos, sin, H, EPS
        )
        shares = shares_PH + tl.program_id(0).to(tl.int64) * H + column
        tl.store(shares, tl.sum(share_low, axis=0))
        tl.store(shares + H // 2, tl.sum(share_high, axis=0))
    grad_rows = grad + at * grad_stride + head * H + row[:, None] * grad_stride
    store_halves(grad_rows, column, mask, low, high, H // 2)


def check(q_TNH: Tensor) -> None:
    """TypeError for a dtype that no specimen covers; the interpreter takes any."""
    if q_TNH.is_cuda and q_TNH.dtype != torch.bfloat16:
        raise TypeError(f"the attention kernels compute in bfloat16, not {q_TNH.dtype}")


def default_config(kernel: str, head_dim: int) -> Config:
    """Of the kernel "forward", "queries" or "keys" (the backward's two)."""
    return CANDIDATES[kernel, head_dim][0]


def programs(tokens: int, segments: int, tile: int, heads: int) -> int:
    """Of a grid that holds every tile of any `segments` documents in `tokens` positions."""
    return (tokens // tile + segments) * heads


def constants(heads: int, kv_heads: int, head_dim: int) -> dict[str, int | float]:
    """The shape, and the softmax's scale: in units of log 2, as the hardware exponentiates."""
    scale = head_dim**-0.5 * math.log2(math.e)
    return {"N": heads, "K": kv_heads, "H": head_dim, "SCALE": scale}


def signature(kernel, kind: str = "*bf16") -> dict[str, str]:
    """Types of a kernel's arguments by their names, constants left out."""
    by_suffix = {"TNH": kind, "TKH": kind, "TH": kind, "S": "*i32"}
    types = dict.fromkeys(("lse_NT", "delta_NT", "gain_H", "shares_PH"), "*fp32")
    types |= dict.fromkeys(("T", "segments"), "i32")
    for name in kernel.arg_names:
        stem, _, suffix = name.rpartition("_")
        if suffix == "stride":
            types[name] = "i32"
        elif stem and suffix in by_suffix:
            types[name] = by_suffix[suffix]
    return {name: types[name] for name in kernel.arg_names if name in types}

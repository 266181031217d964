"""RMSNorm of query and key heads and their rotation (RoPE), one pass each way over the qkv buffer.

Shapes: T packed positions, N query heads, K key/value heads, A = N + 2K rows of a position (q, k,
v), H head dimension, C = H / 2 its half, P programs of the backward.

Everything between load and store is float32, with one rounding at the end: better than the plain
path, which rounds after the norm, the gain, both products and their sum, and rounds the gains.
A head is held as its two halves, which is all that rotate-half needs: nothing is shuffled.

Elements moved per position (2 bytes each in bf16; N, K, H = 4, 2, 128 -> bytes):

    forward   reads (N + K) H of qkv and H of tables, writes (N + K) H                     3,328
    backward  reads 2 (N + K) H + K H (x, dq, dk, dv) and H of tables, writes A H          5,888
    plain     forward 28 (N + K) H: 11 operators, some in float32                       43,008
              backward more than twice that, and the concatenation of dq, dk, dv 2 A H

About 7 FLOPs an element forward and 20 backward: 2 or 3 a byte, far below the ridge of 445, so
bytes decide; at 220 GB/s and 49,152 positions they take 0.74 ms and 1.3 ms a layer. A compiler that
fuses all of the plain forward moves the same bytes; in the backward it can't put both norms, the
gains' sums and the concatenation into one pass, as here.

Tables are read, not recomputed: only the first half of each (both halves are equal), H elements a
position beside the 2 (N + K) H of the heads, 8 % at the shape above. Angles from positions would
need float32 sines of thousands of radians, whose range reduction takes a stack, and other bits.

SASS for sm_121: loads and stores of 16 bytes throughout, no stack, no spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "qk_rope"


@triton.jit
def norm_rope(low, high, gain_low, gain_high, cos, sin, H: tl.constexpr, EPS: tl.constexpr):
    """Both halves (rows, C) of heads, normed, scaled and rotated; all float32."""
    squares = tl.sum(low * low + high * high, axis=1)
    scale = tl.rsqrt(squares / H + EPS)[:, None]
    low = low * scale * gain_low[None, :]
    high = high * scale * gain_high[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def norm_rope_backward(
    grad_low,
    grad_high,
    low,
    high,
    gain_low,
    gain_high,
    cos,
    sin,
    H: tl.constexpr,
    EPS: tl.constexpr,
):
    """Gradients of the inputs `low`, `high` (rows, C), then each row's share of the gains'."""
    squares = tl.sum(low * low + high * high, axis=1)
    scale = tl.rsqrt(squares / H + EPS)[:, None]
    low = low * scale
    high = high * scale
    turned_low = grad_low * cos + grad_high * sin
    turned_high = grad_high * cos - grad_low * sin
    share_low = turned_low * low
    share_high = turned_high * high
    grad_low = turned_low * gain_low[None, :]
    grad_high = turned_high * gain_high[None, :]
    along = (tl.sum(grad_low * low + grad_high * high, axis=1) / H)[:, None]
    grad_low = (grad_low - low * along) * scale
    grad_high = (grad_high - high * along) * scale
    return grad_low, grad_high, share_low, share_high


@triton.jit
def load_halves(rows, column, mask, C: tl.constexpr):
    """Float32 halves of the rows at the pointers `rows` (rows, 1); zeros where masked."""
    low = tl.load(rows + column[None, :], mask=mask, other=0.0)
    high = tl.load(rows + C + column[None, :], mask=mask, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def store_halves(rows, column, mask, low, high, C: tl.constexpr):
    tl.store(rows + column[None, :], low.to(rows.dtype.element_ty), mask=mask)
    tl.store(rows + C + column[None, :], high.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_gain(gain, column, C: tl.constexpr):
    low = tl.load(gain + column, mask=column < C, other=0.0)
    high = tl.load(gain + C + column, mask=column < C, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_tables(cos, sin, row, column, mask, H: tl.constexpr):
    """Float32 (rows, C): the first halves of both tables' rows, which equal the second ones."""
    at = row[:, None] * H + column[None, :]
    cosine = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
    return cosine, tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _qk_rope_forward(
    qkv_TAH,
    q_TNH,
    k_TKH,
    q_gain_H,
    k_gain_H,
    cos_TH,
    sin_TH,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    C: tl.constexpr = H // 2
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = (row < T)[:, None] & (column < C)[None, :]
    cos, sin = load_tables(cos_TH, sin_TH, row, column, mask, H)
    from_rows = qkv_TAH + row[:, None] * ((N + 2 * K) * H)
    gain_low, gain_high = load_gain(q_gain_H, column, C)
    for head in range(N):
        low, high = load_halves(from_rows + head * H, column, mask, C)
        low, high = norm_rope(low, high, gain_low, gain_high, cos, sin, H, EPS)
        store_halves(q_TNH + row[:, None] * (N * H) + head * H, column, mask, low, high, C)
    gain_low, gain_high = load_gain(k_gain_H, column, C)
    for head in range(K):
        low, high = load_halves(from_rows + (N + head) * H, column, mask, C)
        low, high = norm_rope(low, high, gain_low, gain_high, cos, sin, H, EPS)
        store_halves(k_TKH + row[:, None] * (K * H) + head * H, column, mask, low, high, C)


@triton.jit
def _qk_rope_backward(
    dq_TNH,
    dk_TKH,
    dv_TKH,
    qkv_TAH,
    q_gain_H,
    k_gain_H,
    cos_TH,
    sin_TH,
    dqkv_TAH,
    shares_P2H,
    q_stride,
    k_stride,
    v_stride,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    C: tl.constexpr = H // 2
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    q_low, q_high = load_gain(q_gain_H, column, C)
    k_low, k_high = load_gain(k_gain_H, column, C)
    dq_low = tl.zeros((ROWS, COLUMNS), tl.float32)
    dq_high = tl.zeros((ROWS, COLUMNS), tl.float32)
    dk_low = tl.zeros((ROWS, COLUMNS), tl.float32)
    dk_high = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(program, tl.cdiv(T, ROWS), PROGRAMS):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < T)[:, None] & (column < C)[None, :]
        cos, sin = load_tables(cos_TH, sin_TH, row, column, mask, H)
        row = row[:, None]
        x_rows = qkv_TAH + row * ((N + 2 * K) * H)
        dx_rows = dqkv_TAH + row * ((N + 2 * K) * H)
        for head in range(N):
            at = head * H
            dlow, dhigh = load_halves(dq_TNH + row * q_stride + at, column, mask, C)
            low, high = load_halves(x_rows + at, column, mask, C)
            low, high, share_low, share_high = norm_rope_backward(
                dlow, dhigh, low, high, q_low, q_high, cos, sin, H, EPS
            )
            dq_low += share_low
            dq_high += share_high
            store_halves(dx_rows + at, column, mask, low, high, C)
        for head in range(K):
            at = head * H
            dlow, dhigh = load_halves(dk_TKH + row * k_stride + at, column, mask, C)
            low, high = load_halves(x_rows + N * H + at, column, mask, C)
            low, high, share_low, share_high = norm_rope_backward(
                dlow, dhigh, low, high, k_low, k_high, cos, sin, H, EPS
            )
            dk_low += share_low
            dk_high += share_high
            store_halves(dx_rows + N * H + at, column, mask, low, high, C)
            low, high = load_halves(dv_TKH + row * v_stride + at, column, mask, C)
            store_halves(dx_rows + (N + K) * H + at, column, mask, low, high, C)
    shares = shares_P2H + program * (2 * H) + column
    tl.store(shares, tl.sum(dq_low, axis=0), mask=column < C)
    tl.store(shares + C, tl.sum(dq_high, axis=0), mask=column < C)
    tl.store(shares + H, tl.sum(dk_low, axis=0), mask=column < C)
    tl.store(shares + H + C, tl.sum(dk_high, axis=0), mask=column < C)


def default_config(head_dim: int, backward: bool) -> Config:
    """1,024 elements of each half a tile: in bf16, 16 bytes for each of 128 threads.

    The backward's programs are 8 to each of 48 multiprocessors whatever runs them: the order of the
    gains' sums, hence their bits, must not depend on the device.
    """
    tiles = {"ROWS": max(1, 2048 // triton.next_power_of_2(head_dim))}
    return Config(tiles | ({"PROGRAMS": 384} if backward else {}), num_warps=4, num_stages=1)


def token_rows(x_TNH: Tensor) -> Tensor:
    """x itself where each position's heads are contiguous, else a contiguous copy."""
    heads_whole = x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2]
    return x_TNH if heads_whole else x_TNH.contiguous()


def _shape(qkv_TAH: Tensor, heads: int, kv_heads: int, eps: float) -> dict:
    head_dim = qkv_TAH.shape[2]
    columns = triton.next_power_of_2(head_dim // 2)
    return {"N": heads, "K": kv_heads, "H": head_dim, "COLUMNS": columns, "EPS": eps}


def forward(
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    kv_heads: int,
    eps: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """q (T, N, H) and k (T, K, H) of qkv (T, A, H), in its dtype; see `sparkgpt.ops.qk_rope`.

    qkv and tables contiguous, H even.
    """
    tokens, rows, head_dim = qkv_TAH.shape
    heads = rows - 2 * kv_heads
    config = config or default_config(head_dim, backward=False)
    q_TNH = torch.empty(tokens, heads, head_dim, dtype=qkv_TAH.dtype, device=qkv_TAH.device)
    k_TKH = torch.empty(tokens, kv_heads, head_dim, dtype=qkv_TAH.dtype, device=qkv_TAH.device)
    _qk_rope_forward[(triton.cdiv(tokens, config.tiles["ROWS"]),)](
        qkv_TAH,
        q_TNH,
        k_TKH,
        q_gain_H,
        k_gain_H,
        cos_TH,
        sin_TH,
        tokens,
        **_shape(qkv_TAH, heads, kv_heads, eps),
        **config.options,
    )
    return q_TNH, k_TKH


def backward(
    dq_TNH: Tensor,
    dk_TKH: Tensor,
    dv_TKH: Tensor,
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    eps: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv (T, A, H), v's part included, and of both gains (H,) in float32."""
    tokens, _, head_dim = qkv_TAH.shape
    config = config or default_config(head_dim, backward=True)
    programs = config.tiles["PROGRAMS"]
    dqkv_TAH = torch.empty_like(qkv_TAH)
    shares_P2H = torch.empty(programs, 2, head_dim, dtype=torch.float32, device=qkv_TAH.device)
    grads = [token_rows(x) for x in (dq_TNH, dk_TKH, dv_TKH)]
    _qk_rope_backward[(programs,)](
        *grads,
        qkv_TAH,
        q_gain_H,
        k_gain_H,
        cos_TH,
        sin_TH,
        dqkv_TAH,
        shares_P2H,
        *(x.stride(0) for x in grads),
        tokens,
        **_shape(qkv_TAH, dq_TNH.shape[1], dk_TKH.shape[1], eps),
        **config.options,
    )
    return dqkv_TAH, *shares_P2H.sum(0).unbind(0)


def specimens() -> list[Specimen]:
    """Forward and backward at both head dimensions and at our shapes' head counts."""
    found = []
    for heads, kv_heads, head_dim in ((4, 2, 128), (16, 8, 128), (8, 4, 64)):
        shape = {"N": heads, "K": kv_heads, "H": head_dim, "COLUMNS": head_dim // 2, "EPS": 1e-6}
        for kind in ("*bf16", "*fp32")[: 1 if heads == 16 else 2]:
            for kernel in (_qk_rope_forward, _qk_rope_backward):
                config = default_config(head_dim, backward=kernel is _qk_rope_backward)
                types = dict.fromkeys(kernel.arg_names, kind)
                types |= dict.fromkeys(("q_gain_H", "k_gain_H", "shares_P2H"), "*fp32")
                types |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "T"), "i32")
                constant = shape.keys() | config.tiles.keys()
                signature = {n: types[n] for n in kernel.arg_names if n not in constant}
                found.append(Specimen(kernel, signature, shape, config))
    return found

"""Muon's momentum in one pass, and batched matrix products for its Newton-Schulz iteration.

Shapes: B matrices in a batch, M rows, N columns, K the inner dimension, m <= n the short and long
side of a matrix, P blocks of a matrix. Tiles follow from the shape alone, never from a measurement,
so that ranks agree bit by bit.

Bytes per matrix element, bf16 where torch computes in bf16 too:

| pass | here | torch |
| --- | --- | --- |
| momentum, look-ahead, batch, squares | 14: two fp32 read, one written, bf16 written | 38 |
| normalisation | 0: a factor of the first iteration's products | 6 |
| parameter += rate * direction | 10 | 18 |

38 bytes an element less: 1.9 GB or 8.7 ms a step of the dense 50M on GB10 at 220 GB/s (floor of the
whole step: 334 ms), 76 ms of the 0.6B.

An iteration is gram = X X^T, poly = b gram + c gram gram, X = a X + poly X: 4 m^2 n + 2 m^3 FLOPs,
and 6 m n + 8 m^2 bytes when each tensor moves once. Gram and poly are symmetric: the tiles on and
above the diagonal are computed and mirrored, (t + 1) / 2t of them for t tiles a side, at no more
bytes; with t large 3 m^2 n + m^3 FLOPs are left. Five iterations over all matrices, tiles of 128:

| model | FLOPs, torch | here | at 98 TFLOP/s | bytes | at 220 GB/s |
| --- | --- | --- | --- | --- | --- |
| dense 50M (m = 512) | 0.60 T | 0.47 T | 4.8 ms | 2.2 GB | 10 ms |
| dense 0.6B (m = 1024) | 10.2 T | 7.7 T | 79 ms | 18 GB | 81 ms |

So the small model waits for memory, and the large one is spared 25 ms of computing that would not
hide behind it. Programs go through the batch in order, and along the short side first: what they
share (poly, 2 MB, and one panel of X) stays in the 24 MB of L2.
The SASS has 16-byte copies to shared memory (LDGSTS.E.BYPASS.128), LDSM, and HMMA.16816.F32.BF16;
the mirrored tile is transposed through shared memory and stored by 16 bytes too.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "newton_schulz"
# 4,096 elements of a matrix a program: 16 for each thread, four 16-byte loads of each tensor.
LOOK_AHEAD = Config({"BLOCK": 4096}, num_warps=8, num_stages=1)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


@triton.jit(do_not_specialize=["first"])
def _look_ahead(
    grad_ptr,
    average_ptr,
    batch_ptr,
    squares_ptr,
    first,
    size,
    FRESH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """average += FRESH * (grad - average); batch = that moved by FRESH towards grad once more.

    Program (matrix, block) of this parameter's matrices, which start at `first` in the batch.
    """
    blocks = tl.cdiv(size, BLOCK)
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    grad = tl.load(grad_ptr + matrix * size + at, mask=mask, other=0.0)
    average = tl.load(average_ptr + matrix * size + at, mask=mask, other=0.0)
    average += FRESH * (grad - average)
    tl.store(average_ptr + matrix * size + at, average, mask=mask)
    look = (average + FRESH * (grad - average)).to(batch_ptr.dtype.element_ty)
    tl.store(batch_ptr + (first + matrix) * size + at, look, mask=mask)
    look = look.to(tl.float32)
    tl.store(squares_ptr + (first + matrix) * blocks + block, tl.sum(look * look))


@triton.jit
def _gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    scale_ptr,
    out_ptr,
    M,
    N,
    K,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = scale * (ALPHA * a @ b + BETA * c) for each matrix; c and scale may be None.

    A_TRANSPOSED: a lies in memory as (K, M). SYMMETRIC: the tiles below the diagonal are mirrored.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    matrix = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    if M > N:  # the short side first
        tile_m, tile_n = tile // tiles_n, tile % tiles_n
    else:
        tile_m, tile_n = tile % tiles_m, tile // tiles_m
    if SYMMETRIC:
        if tile_m > tile_n:
            return
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptr += matrix * M * K
    b_ptr += matrix * N * K
    if A_TRANSPOSED:
        a_ptrs, a_step = a_ptr + k[None, :] * M + m[:, None], BLOCK_K * M
    else:
        a_ptrs, a_step = a_ptr + m[:, None] * K + k[None, :], BLOCK_K
    if B_TRANSPOSED:
        b_ptrs, b_step = b_ptr + n[None, :] * K + k[:, None], BLOCK_K
    else:
        b_ptrs, b_step = b_ptr + k[:, None] * N + n[None, :], BLOCK_K * N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(a_ptrs, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += a_step
        b_ptrs += b_step
    at = matrix * M * N + m[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    total *= ALPHA
    if c_ptr is not None:
        total += BETA * tl.load(c_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + matrix)
        # A scale of 0 is 1 over a norm that overflowed, and so did the product: x / inf is 0.
        total = tl.where(scale == 0.0, 0.0, total * scale)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=mask)
    if SYMMETRIC:
        if tile_m != tile_n:
            at = matrix * M * N + n[:, None] * N + m[None, :]
            mask = (n < N)[:, None] & (m < M)[None, :]
            tl.store(out_ptr + at, tl.trans(out), mask=mask)


def default_config(rows: int, columns: int, dtype: torch.dtype) -> Config:
    """Tiles of a product of this shape: 128 wide where both sides fill one, or else 64."""
    if dtype == torch.float32:
        return Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    if min(rows, columns) >= 128:
        return Config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3)
    return Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=3)


def gemm(
    a_BMK: Tensor,
    b_BKN: Tensor,
    *,
    alpha: float = 1.0,
    c_BMN: Tensor | None = None,
    beta: float = 0.0,
    scale_B: Tensor | None = None,
    symmetric: bool = False,
    out_BMN: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """scale * (alpha * a @ b + beta * c), added in fp32 -> (B, M, N), in the dtype of a or `out`.

    a and b are contiguous or transposed views of contiguous tensors; c is contiguous and may be
    `out` itself; scale (B,) float32. `symmetric` says that the result is: half is computed.
    """
    (batch, rows, inner), columns = a_BMK.shape, b_BKN.shape[2]
    config = config or default_config(rows, columns, a_BMK.dtype)
    a_transposed, b_transposed = not a_BMK.is_contiguous(), not b_BKN.is_contiguous()
    for x, transposed in ((a_BMK, a_transposed), (b_BKN, b_transposed)):
        assert (x.mT if transposed else x).is_contiguous()
    if out_BMN is None:
        out_BMN = torch.empty(batch, rows, columns, dtype=a_BMK.dtype, device=a_BMK.device)
    tiles = triton.cdiv(rows, config.tiles["BLOCK_M"]) * triton.cdiv(
        columns, config.tiles["BLOCK_N"]
    )
    _gemm[(batch * tiles,)](
        *(a_BMK, b_BKN, c_BMN, scale_B, out_BMN, rows, columns, inner),
        *(alpha, beta, a_transposed, b_transposed, symmetric),
        **config.options,
    )
    return out_BMN


def look_ahead(
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    momentum: float,
    dtype: torch.dtype,
    config: Config = LOOK_AHEAD,
) -> tuple[Tensor, Tensor]:
    """Momentum and Nesterov look-ahead of parameters of one shape, (..., M, N) fp32 each.

    Updates `averages` in place. Returns the directions (B, M, N) in `dtype`, all matrices in one
    batch, and sums of their squares by block (B, P) float32.
    """
    shape = gradients[0].shape
    size, stack = shape[-2] * shape[-1], shape[:-2].numel()
    batch, blocks = len(gradients) * stack, triton.cdiv(size, config.tiles["BLOCK"])
    device = gradients[0].device
    batch_BMN = torch.empty(batch, *shape[-2:], dtype=dtype, device=device)
    squares_BP = torch.empty(batch, blocks, dtype=torch.float32, device=device)
    for i, (grad, average) in enumerate(zip(gradients, averages, strict=True)):
        assert average.is_contiguous()  # updated in place
        _look_ahead[(stack * blocks,)](
            *(grad.contiguous(), average, batch_BMN, squares_BP, i * stack, size),
            FRESH=1 - momentum,
            **config.options,
        )
    return batch_BMN, squares_BP


def specimens() -> list[Specimen]:
    """The momentum pass, and an iteration's products, wide and tall, in each tile size."""
    types = ("*fp32", "*fp32", "*bf16", "*fp32", "i32", "i32")
    names = ("grad_ptr", "average_ptr", "batch_ptr", "squares_ptr", "first", "size")
    signature = dict(zip(names, types, strict=True))
    momentum = Specimen(_look_ahead, signature, {"FRESH": 0.05}, LOOK_AHEAD)
    products = [
        gemm_specimen(dtype, side, **product)
        for dtype, side in ((torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float32, 64))
        for product in _products()
    ]
    return [momentum, *products]


def _products() -> list[dict]:
    gram, update = {"scale": True, "symmetric": True}, {"alpha": 1.0, "beta": 3.4445, "c": True}
    return [
        {**gram, "b_transposed": True},  # wide: X X^T
        {**gram, "a_transposed": True},  # tall: X^T X
        {"symmetric": True, "alpha": 2.0315, "beta": -4.775, "c": True},
        update | {"scale": True},
        update,
    ]


def gemm_specimen(
    dtype: torch.dtype,
    side: int,
    out: str | None = None,
    c: bool = False,
    scale: bool = False,
    symmetric: bool = False,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Specimen:
    """`gemm` of matrices with `side` rows and columns; `out` the type of c and out, if another."""
    kind = TYPES[dtype]
    out = out or kind
    signature = {"a_ptr": kind, "b_ptr": kind, "c_ptr": out, "scale_ptr": "*fp32", "out_ptr": out}
    signature |= {"M": "i32", "N": "i32", "K": "i32"}
    constants = {"ALPHA": alpha, "BETA": beta, "SYMMETRIC": symmetric}
    constants |= {"A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed}
    for name, given in (("c_ptr", c), ("scale_ptr", scale)):
        if not given:
            del signature[name]
            constants[name] = None
    return Specimen(_gemm, signature, constants, default_config(side, side, dtype))

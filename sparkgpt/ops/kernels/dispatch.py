"""Rows to experts and back: dispatch, combine and their backward, one pass each.

Shapes: T packed positions, D model width, k experts per position, R = T * k rows sorted by expert.
`inverse` (R,) int64 says where row (position, choice) stands in expert order; it is a permutation.

All four kernels go by position: a program holds a few positions and touches each one's k rows. As
`inverse` is a permutation, no two programs write one row and none is left out: no atomics, equal
bits in every run. Gathering by row instead would read each position k times.

Traffic in units of T * D elements, per layer (the index and the (T, k) weights are below 1 %):

| pass | here | k = 2 | inductor, unfused | k = 2 |
| --- | --- | --- | --- | --- |
| dispatch | 1 + k | 3 | k + k | 4 |
| its backward | k + 1 | 3 | k + 1 | 3 |
| combine | k + 1 | 3 | k + 1, and k to save the rows in order | 3 to 5 |
| its backward | 1 + 2k | 5 | 2k for the rows, 1 + k for the weights | 7 |

Eager torch moves 36 units where these move 14. On GB10 a unit is 50 MB in bf16 at T = 49,152 and
D = 512, or 0.23 ms at 220 GB/s: 3.2 ms a layer against at least 3.9 ms. At most 2k + 1 FLOPs per
element read: bandwidth decides alone. The SASS has 16-byte loads and stores (LDG.E.128, STG.E.128).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "dispatch"
TILE = 2048  # elements of a tile: 16 for each of 128 threads, two 16-byte loads of bf16


@triton.jit
def _dispatch(
    x_ptr,
    inverse_ptr,
    rows_ptr,
    T,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """rows[inverse[t, j]] = x[t] for each choice j."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = t < T
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = real[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=mask)
        for choice in tl.static_range(K):
            row = tl.load(inverse_ptr + t * K + choice, mask=real, other=0)
            tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=mask)


@triton.jit
def _combine(
    rows_ptr,
    weight_ptr,
    inverse_ptr,
    out_ptr,
    T,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t] = sum over j of weight[t, j] * rows[inverse[t, j]]; weight None: of the rows alone."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = t < T
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = real[:, None] & (d < D)[None, :]
        total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for choice in tl.static_range(K):
            row = tl.load(inverse_ptr + t * K + choice, mask=real, other=0)
            y = tl.load(rows_ptr + row[:, None] * D + d[None, :], mask=mask).to(tl.float32)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + t * K + choice, mask=real, other=0.0)
                y *= weight.to(tl.float32)[:, None]
            total += y
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t[:, None] * D + d[None, :], out, mask=mask)


@triton.jit
def _combine_backward(
    grad_ptr,
    rows_ptr,
    weight_ptr,
    inverse_ptr,
    grad_rows_ptr,
    grad_weight_ptr,
    T,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_rows[inverse[t, j]] = weight[t, j] * grad[t]; grad_weight[t, j] = grad[t] . that row."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = t < T
    choices = tl.arange(0, BLOCK_K)
    dots = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = real[:, None] & (d < D)[None, :]
        at = t[:, None] * D + d[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        for choice in tl.static_range(K):
            row = tl.load(inverse_ptr + t * K + choice, mask=real, other=0)
            at = row[:, None] * D + d[None, :]
            y = tl.load(rows_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dot = tl.sum(grad * y, 1)
            dots += tl.where((choices == choice)[None, :], dot[:, None], 0.0)
            weight = tl.load(weight_ptr + t * K + choice, mask=real, other=0.0)
            out = (weight.to(tl.float32)[:, None] * grad).to(grad_rows_ptr.dtype.element_ty)
            tl.store(grad_rows_ptr + at, out, mask=mask)
    dots = dots.to(grad_weight_ptr.dtype.element_ty)
    at = t[:, None] * K + choices[None, :]
    tl.store(grad_weight_ptr + at, dots, mask=real[:, None] & (choices < K)[None, :])


def default_config(width: int) -> Config:
    """One position's row as wide as it is, up to 1,024 elements, and positions to fill a tile."""
    block_d = min(max(triton.next_power_of_2(width), 16), 1024)
    return Config({"BLOCK_T": min(TILE // block_d, 64), "BLOCK_D": block_d}, num_stages=1)


def _grid(positions: int, config: Config) -> tuple[int]:
    return (triton.cdiv(positions, config.tiles["BLOCK_T"]),)


def dispatch(x_TD: Tensor, inverse_R: Tensor, k: int, config: Config | None = None) -> Tensor:
    """(T, D), inverse (T * k,) int64 -> (R, D) in x's dtype."""
    positions, width = x_TD.shape
    config = config or default_config(width)
    rows_RD = torch.empty(positions * k, width, dtype=x_TD.dtype, device=x_TD.device)
    _dispatch[_grid(positions, config)](
        x_TD.contiguous(), inverse_R, rows_RD, positions, width, k, **config.options
    )
    return rows_RD


def combine(
    rows_RD: Tensor,
    weight_Tk: Tensor | None,
    inverse_R: Tensor,
    k: int,
    config: Config | None = None,
) -> Tensor:
    """(R, D) rows, weights (T, k) or None for ones -> (T, D) in the rows' dtype, added in fp32.

    Without weights it is the backward of `dispatch`.
    """
    positions, width = rows_RD.shape[0] // k, rows_RD.shape[1]
    config = config or default_config(width)
    weight_Tk = None if weight_Tk is None else weight_Tk.contiguous()
    out_TD = torch.empty(positions, width, dtype=rows_RD.dtype, device=rows_RD.device)
    _combine[_grid(positions, config)](
        rows_RD.contiguous(), weight_Tk, inverse_R, out_TD, positions, width, k, **config.options
    )
    return out_TD


def combine_backward(
    grad_TD: Tensor,
    rows_RD: Tensor,
    weight_Tk: Tensor,
    inverse_R: Tensor,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """grad (T, D) and the forward's arguments -> gradients of rows (R, D) and weights (T, k)."""
    (positions, width), k = grad_TD.shape, weight_Tk.shape[1]
    config = config or default_config(width)
    grad_rows_RD, grad_weight_Tk = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for like in (rows_RD, weight_Tk)
    )
    _combine_backward[_grid(positions, config)](
        grad_TD.contiguous(),
        rows_RD.contiguous(),
        weight_Tk.contiguous(),
        inverse_R,
        grad_rows_RD,
        grad_weight_Tk,
        positions,
        width,
        k,
        triton.next_power_of_2(k),
        **config.options,
    )
    return grad_rows_RD, grad_weight_Tk


def specimens() -> list[Specimen]:
    """All kernels at both widths we train and every k up to 8 in bf16, and once in fp32."""
    shapes = [("*bf16", width, k) for width in (512, 1024) for k in (1, 2, 4, 8)]
    return [
        specimen for shape in [*shapes, ("*fp32", 512, 2)] for specimen in _specimens_of(*shape)
    ]


def _specimens_of(float_type: str, width: int, k: int) -> list[Specimen]:
    config, constants = default_config(width), {"D": width, "K": k}
    types = lambda *names: {
        name: "*i64" if name == "inverse_ptr" else "i32" if name == "T" else float_type
        for name in names
    }
    combine_types = types("rows_ptr", "weight_ptr", "inverse_ptr", "out_ptr", "T")
    unweighted = {name: kind for name, kind in combine_types.items() if name != "weight_ptr"}
    backward_types = types(
        *("grad_ptr", "rows_ptr", "weight_ptr", "inverse_ptr"),
        *("grad_rows_ptr", "grad_weight_ptr", "T"),
    )
    padded = {"BLOCK_K": triton.next_power_of_2(k)}
    return [
        Specimen(_dispatch, types("x_ptr", "inverse_ptr", "rows_ptr", "T"), constants, config),
        Specimen(_combine, combine_types, constants, config),
        Specimen(_combine, unweighted, constants | {"weight_ptr": None}, config),
        Specimen(_combine_backward, backward_types, constants | padded, config),
    ]

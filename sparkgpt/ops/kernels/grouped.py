"""Plain matrix products over rows sorted by expert, and where each tile finds its rows (Triton).

Shapes: R rows sorted by expert, E experts (1 for a dense layer), K and N the inner and the outer
width of a product; offsets (E,) int32 on the device, the end of each expert's rows.

The host never reads the offsets. Expert e owns the tiles from `start // BLOCK_R + e` on, start
being its first row. That leaves it at least `ceil(rows / BLOCK_R)` of them before its neighbour's
first, so a program finds its rows by one comparison with every offset, and R // BLOCK_R + E + 1
tiles are always enough. Rows beyond the last offset are one more group, whose outputs are zeros.
One binary serves every R; widths that are no multiple of 16 get slower ones that no specimen has.

| product | reads | writes | FLOPs |
| --- | --- | --- | --- |
| `grouped_matmul`, y = a w^T or a w | RK + EKN | RN | 2RKN |
| `grouped_outer`, dw = g^T a | RN + RK | EKN | 2RKN |

Elements, each once: column tiles that run together share their rows through L2. The same bytes as
torch's own grouped product; ahead of it on sm_12x, where that loops over experts on the host.
SASS for sm_121: every operand by 16-byte LDGSTS, LDSM (.MT for transposes), HMMA.16816, STG.128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.specimen import Config, Specimen

# Tiles for 16-bit operands, best guess first; all fit 101,376 bytes of shared memory.
MATMUL = (
    Config({"BLOCK_R": 128, "BLOCK_N": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3),
    Config({"BLOCK_R": 128, "BLOCK_N": 256, "BLOCK_K": 32}, num_warps=8, num_stages=3),
)
OUTER = (
    Config({"BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_R": 64}, num_warps=8, num_stages=3),
    Config({"BLOCK_N": 128, "BLOCK_K": 256, "BLOCK_R": 32}, num_warps=8, num_stages=4),
)


def default_config(candidates: tuple[Config, ...], dtype: torch.dtype) -> Config:
    """The first candidate; for float32, which has no tensor cores here, tiles of 32."""
    if dtype == torch.float32:
        return Config(dict.fromkeys(candidates[0].tiles, 32), num_warps=4, num_stages=2)
    return candidates[0]


def tiles_of(rows: int, num_experts: int, block: int) -> int:
    """How many tiles of rows cover any split of the rows over experts, and those beyond."""
    return rows // block + num_experts + 1


def expert_constants(num_experts: int) -> dict[str, int]:
    """The constants of `row_tile`: one lane for each expert and one for the rows beyond."""
    return {"E": num_experts, "LANES": triton.next_power_of_2(num_experts + 1)}


@triton.jit
def row_tile(
    offsets_ptr, R, N,
    E: tl.constexpr, LANES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(expert, first row, end of the expert's rows, columns) of this program's tile of (R, N).

    Expert E stands for 'beyond the last'. A tile too many begins at the end or beyond it.
    """
    # Column tiles run fastest: the rows are read from memory once, and the weights stay in L2.
    columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // columns
    lane = tl.arange(0, LANES)
    end_E = tl.load(offsets_ptr + lane, mask=lane < E, other=R)
    expert = tl.sum((end_E // BLOCK_R + lane + 1 <= tile).to(tl.int32))
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert, mask=expert < E, other=R)
    row = start + (tile - start // BLOCK_R - expert) * BLOCK_R
    return expert, row, end, tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def store_tile(out_ptr, values, row, column, rows, columns, stride):
    """Write float32 `values` in out's dtype, where `row` and `column` are below their counts."""
    out_ptrs = out_ptr + row[:, None] * stride + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _grouped_matmul(
    a_ptr, weight_ptr, offsets_ptr, out_ptr, R, K, N,
    E: tl.constexpr, LANES: tl.constexpr, BY_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (R, N) = a (R, K) times weight[e].T of (E, N, K), or weight[e] of (E, K, N): BY_ROWS."""
    expert, row, end, n = row_tile(offsets_ptr, R, N, E, LANES, BLOCK_R, BLOCK_N)
    if row >= end:
        return
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    # Rows of the next expert are computed again rather than masked in the loop; only stores mask.
    safe_r = tl.minimum(r, end - row - 1)
    a_ptrs = a_ptr + row.to(tl.int64) * K + safe_r[:, None] * K + k[None, :]
    w_ptrs = weight_ptr + expert.to(tl.int64) * K * N
    if BY_ROWS:
        w_ptrs += k[:, None] * N + n[None, :]
    else:
        w_ptrs += n[None, :] * K + k[:, None]
    out = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k0 in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        a = tl.load(a_ptrs, mask=(k < K - k0)[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=(k < K - k0)[:, None] & (n < N)[None, :], other=0.0)
        out = tl.dot(a, w, out, input_precision="ieee")
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * N if BY_ROWS else BLOCK_K
    store_tile(out_ptr + row.to(tl.int64) * N, out, r, n, end - row, N, N)


@triton.jit
def expert_rows(expert, offsets_ptr):
    """(first row, end) of an expert."""
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    return start, tl.load(offsets_ptr + expert)


@triton.jit
def _grouped_outer(
    grad_ptr, a_ptr, offsets_ptr, out_ptr, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out (E, N, K) = per expert, the transpose of its rows of grad (R, N) times those of a (R, K).

    An expert without rows never enters the loop and gets zeros.
    """
    columns, blocks = tl.cdiv(K, BLOCK_K), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    expert = pid // (columns * blocks)
    n = pid // columns % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    k = pid % columns * BLOCK_K + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    start, end = expert_rows(expert, offsets_ptr)
    # Loaded as its transpose, so that it goes from shared memory to the tensor cores as it is.
    grad_ptrs = grad_ptr + start.to(tl.int64) * N + r[None, :] * N + n[:, None]
    a_ptrs = a_ptr + start.to(tl.int64) * K + r[:, None] * K + k[None, :]
    out = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for r0 in range(start, end, BLOCK_R):
        own = r < end - r0
        grad = tl.load(grad_ptrs, mask=own[None, :] & (n < N)[:, None], other=0.0)
        a = tl.load(a_ptrs, mask=own[:, None] & (k < K)[None, :], other=0.0)
        out = tl.dot(grad, a, out, input_precision="ieee")
        grad_ptrs += BLOCK_R * N
        a_ptrs += BLOCK_R * K
    store_tile(out_ptr + expert.to(tl.int64) * N * K, out, n, k, N, K, K)


def grouped_matmul(
    a_RK: Tensor,
    weight: Tensor,
    offsets_E: Tensor,
    by_rows: bool = False,
    config: Config | None = None,
) -> Tensor:
    """(R, K), (E, N, K) -> (R, N), rows times weight[e].T; `by_rows`: times weight[e], (E, K, N).

    All contiguous and of one dtype. Rows beyond the last offset come out as zeros.
    """
    config = config or default_config(MATMUL, a_RK.dtype)
    rows, inner = a_RK.shape
    experts, outer = weight.shape[0], weight.shape[2 if by_rows else 1]
    out_RN = torch.empty(rows, outer, dtype=a_RK.dtype, device=a_RK.device)
    tiles = tiles_of(rows, experts, config.tiles["BLOCK_R"])
    grid = (tiles * triton.cdiv(outer, config.tiles["BLOCK_N"]),)
    constants = {**expert_constants(experts), "BY_ROWS": by_rows, **config.options}
    _grouped_matmul[grid](a_RK, weight, offsets_E, out_RN, rows, inner, outer, **constants)
    return out_RN


def grouped_outer(
    grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor, config: Config | None = None
) -> Tensor:
    """(R, N), (R, K) -> (E, N, K): each expert's sum of outer products of its rows."""
    config = config or default_config(OUTER, a_RK.dtype)
    experts, outer, inner = offsets_E.numel(), grad_RN.shape[1], a_RK.shape[1]
    out_ENK = torch.empty(experts, outer, inner, dtype=a_RK.dtype, device=a_RK.device)
    tiles = config.tiles
    grid = (experts * triton.cdiv(outer, tiles["BLOCK_N"]) * triton.cdiv(inner, tiles["BLOCK_K"]),)
    _grouped_outer[grid](grad_RN, a_RK, offsets_E, out_ENK, outer, inner, **config.options)
    return out_ENK


def specimens_of(
    kernel: triton.JITFunction, candidates: tuple[Config, ...], constants: dict[str, object]
) -> list[Specimen]:
    """Every candidate in bfloat16, and the one for float32."""
    signature = {p.name: _type(p.name) for p in kernel.params if not p.is_constexpr}
    in_float32 = {name: kind.replace("bf16", "fp32") for name, kind in signature.items()}
    found = [Specimen(kernel, signature, constants, config) for config in candidates]
    small = default_config(candidates, torch.float32)
    return [*found, Specimen(kernel, in_float32, constants, small)]


def _type(name: str) -> str:
    if name == "offsets_ptr":
        return "*i32"
    return "*bf16" if name.endswith("_ptr") else "i32"


def matmul_specimens(num_experts: int) -> list[Specimen]:
    """`grouped_matmul`, both ways."""
    constants = expert_constants(num_experts)
    return [
        specimen
        for by_rows in (False, True)
        for specimen in specimens_of(_grouped_matmul, MATMUL, {**constants, "BY_ROWS": by_rows})
    ]


def outer_specimens() -> list[Specimen]:
    """`grouped_outer`, which is the same for any number of experts."""
    return specimens_of(_grouped_outer, OUTER, {})

"""SwiGLU over rows sorted by expert, fused into its matrix products (Triton).

Shapes: R rows sorted by expert, E experts (1 for a dense layer), D model width, F hidden width;
offsets (E,) int32 on the device; gate's rows come first in gate_up (E, 2F, D), its columns first in
the pre-activations (R, 2F). U = RF and V = RD elements, each counted once (column tiles that run
together share their rows through L2); weights, at most 2EFD, are left out.

| step | fused: read, write | apart: read, write | FLOPs |
| --- | --- | --- | --- |
| gate_up and silu(gate) * up | V, 3U | V + 2U, 3U | 4RDF |
| down | U, V | U, V | 2RDF |
| down's dgrad, wgrad | 2V + U, U | 2V + U, U | 4RDF |
| gate_up's dgrad | 3U, V | 3U + 2U, 2U + V | 4RDF |
| gate_up's wgrad | 3U + V, - | 2U + V, - | 4RDF |
| sum | 12U + 6V | 17U + 6V | 18RDF |

In bfloat16 with R = 49,152, D = 512, F = 1536: 2.1 GB against 2.9 GB a layer, 9.6 ms against 13.0
at 220 GB/s, and 7.1 ms of FLOPs at 98 TFLOP/s: bound by memory, so fewer bytes is faster. At
D = 1024, F = 3072 FLOPs bind (28 ms a layer), and what the fused kernels leave out, passes of 8U
that no product overlaps, is 11 ms: they are ahead while they reach 72 % of the library's rate.

Saved for the backward: x, hidden, and the pre-activations in the compute dtype. To make those again
takes another product of 4RDF, 1.6 ms at D = 512 and the best rate, to move U - V elements less, 0.5
ms; only memory, 2U elements a layer, would be won. The derivative stands in the prologues of dgrad
and wgrad: in the epilogue of down's dgrad it would move U more (4U + V there, then 2U + V twice).
A weight's gradient is summed in float32 by one program over all rows of its expert, in their order:
no atomics, equal bits every time.
SASS for sm_121: operands by 16-byte LDGSTS (what the prologues change too: it goes from shared
memory by LDSM into the registers that HMMA.16816 reads), STG.128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.grouped import (
    default_config,
    expert_constants,
    expert_rows,
    matmul_specimens,
    outer_specimens,
    row_tile,
    specimens_of,
    store_tile,
    tiles_of,
)
from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "swiglu"

# Tiles for 16-bit operands, best guess first; all fit 101,376 bytes of shared memory.
FORWARD = (
    Config({"BLOCK_R": 128, "BLOCK_F": 64, "BLOCK_D": 64}, num_warps=8, num_stages=3),
    Config({"BLOCK_R": 64, "BLOCK_F": 128, "BLOCK_D": 32}, num_warps=8, num_stages=4),
)
DGRAD = (
    Config({"BLOCK_R": 128, "BLOCK_D": 128, "BLOCK_F": 32}, num_warps=8, num_stages=3),
    Config({"BLOCK_R": 128, "BLOCK_D": 128, "BLOCK_F": 16}, num_warps=8, num_stages=5),
)
WGRAD = (
    Config({"BLOCK_F": 128, "BLOCK_D": 128, "BLOCK_R": 16}, num_warps=8, num_stages=5),
    Config({"BLOCK_F": 64, "BLOCK_D": 64, "BLOCK_R": 32}, num_warps=4, num_stages=4),
)


@triton.jit(do_not_specialize=["R"])
def _swiglu_forward(
    x_ptr, weight_ptr, offsets_ptr, gate_up_ptr, hidden_ptr, R, D, F,
    E: tl.constexpr, LANES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """gate_up (R, 2F) = x (R, D) times weight[e].T of (E, 2F, D); hidden (R, F) from it."""
    expert, row, end, f = row_tile(offsets_ptr, R, F, E, LANES, BLOCK_R, BLOCK_F)
    if row >= end:
        return
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    safe_r = tl.minimum(r, end - row - 1)
    x_ptrs = x_ptr + row.to(tl.int64) * D + safe_r[:, None] * D + d[None, :]
    w_ptrs = weight_ptr + expert.to(tl.int64) * 2 * F * D + f[None, :] * D + d[:, None]
    gate = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for d0 in range(0, tl.where(expert < E, D, 0), BLOCK_D):
        inside = (d < D - d0)[:, None] & (f < F)[None, :]
        x = tl.load(x_ptrs, mask=(d < D - d0)[None, :], other=0.0)
        gate = tl.dot(x, tl.load(w_ptrs, mask=inside, other=0.0), gate, input_precision="ieee")
        w_up = tl.load(w_ptrs + F * D, mask=inside, other=0.0)
        up = tl.dot(x, w_up, up, input_precision="ieee")
        x_ptrs += BLOCK_D
        w_ptrs += BLOCK_D
    gate_up_ptr += row.to(tl.int64) * 2 * F
    store_tile(gate_up_ptr, gate, r, f, end - row, F, 2 * F)
    store_tile(gate_up_ptr + F, up, r, f, end - row, F, 2 * F)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    store_tile(hidden_ptr + row.to(tl.int64) * F, hidden, r, f, end - row, F, F)


@triton.jit
def _derivative(grad, gate, up):
    """Gradients of gate and up, in float32, from that of silu(gate) * up."""
    grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    share = tl.sigmoid(gate)
    return grad * up * share * (1.0 + gate * (1.0 - share)), grad * gate * share


@triton.jit(do_not_specialize=["R"])
def _swiglu_dgrad(
    grad_ptr, gate_up_ptr, weight_ptr, offsets_ptr, out_ptr, R, D, F,
    E: tl.constexpr, LANES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out (R, D): the gradient of x, from that of hidden, grad (R, F)."""
    expert, row, end, d = row_tile(offsets_ptr, R, D, E, LANES, BLOCK_R, BLOCK_D)
    if row >= end:
        return
    f = tl.arange(0, BLOCK_F)
    r = tl.arange(0, BLOCK_R)
    safe_r = tl.minimum(r, end - row - 1)
    grad_ptrs = grad_ptr + row.to(tl.int64) * F + safe_r[:, None] * F + f[None, :]
    gate_ptrs = gate_up_ptr + row.to(tl.int64) * 2 * F + safe_r[:, None] * 2 * F + f[None, :]
    w_ptrs = weight_ptr + expert.to(tl.int64) * 2 * F * D + f[:, None] * D + d[None, :]
    out = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for f0 in range(0, tl.where(expert < E, F, 0), BLOCK_F):
        inside = (f < F - f0)[None, :]
        grad = tl.load(grad_ptrs, mask=inside, other=0.0)
        gate = tl.load(gate_ptrs, mask=inside, other=0.0)
        up = tl.load(gate_ptrs + F, mask=inside, other=0.0)
        w_inside = (f < F - f0)[:, None] & (d < D)[None, :]
        w_gate = tl.load(w_ptrs, mask=w_inside, other=0.0)
        w_up = tl.load(w_ptrs + F * D, mask=w_inside, other=0.0)
        d_gate, d_up = _derivative(grad, gate, up)
        out = tl.dot(d_gate.to(w_gate.dtype), w_gate, out, input_precision="ieee")
        out = tl.dot(d_up.to(w_up.dtype), w_up, out, input_precision="ieee")
        grad_ptrs += BLOCK_F
        gate_ptrs += BLOCK_F
        w_ptrs += BLOCK_F * D
    store_tile(out_ptr + row.to(tl.int64) * D, out, r, d, end - row, D, D)


@triton.jit
def _swiglu_wgrad(
    grad_ptr, gate_up_ptr, x_ptr, offsets_ptr, out_ptr, D, F,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out (E, 2F, D): the gradient of the weight. An expert without rows gets zeros."""
    columns, blocks = tl.cdiv(D, BLOCK_D), tl.cdiv(F, BLOCK_F)
    pid = tl.program_id(0)
    expert = pid // (columns * blocks)
    f = pid // columns % blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    d = pid % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    start, end = expert_rows(expert, offsets_ptr)
    # Transposed loads: the derivative's result is then the left operand without a shuffle.
    grad_ptrs = grad_ptr + start.to(tl.int64) * F + r[None, :] * F + f[:, None]
    gate_ptrs = gate_up_ptr + start.to(tl.int64) * 2 * F + r[None, :] * 2 * F + f[:, None]
    x_ptrs = x_ptr + start.to(tl.int64) * D + r[:, None] * D + d[None, :]
    out_gate = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    out_up = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    for r0 in range(start, end, BLOCK_R):
        own = r < end - r0
        inside = own[None, :] & (f < F)[:, None]
        grad = tl.load(grad_ptrs, mask=inside, other=0.0)
        gate = tl.load(gate_ptrs, mask=inside, other=0.0)
        up = tl.load(gate_ptrs + F, mask=inside, other=0.0)
        x = tl.load(x_ptrs, mask=own[:, None] & (d < D)[None, :], other=0.0)
        d_gate, d_up = _derivative(grad, gate, up)
        out_gate = tl.dot(d_gate.to(x.dtype), x, out_gate, input_precision="ieee")
        out_up = tl.dot(d_up.to(x.dtype), x, out_up, input_precision="ieee")
        grad_ptrs += BLOCK_R * F
        gate_ptrs += BLOCK_R * 2 * F
        x_ptrs += BLOCK_R * D
    out_ptr += expert.to(tl.int64) * 2 * F * D
    store_tile(out_ptr, out_gate, f, d, F, D, D)
    store_tile(out_ptr + F * D, out_up, f, d, F, D, D)


def swiglu_forward(
    x_RD: Tensor, weight_EGD: Tensor, offsets_E: Tensor, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(R, D), (E, 2F, D) -> hidden (R, F) and the pre-activations (R, 2F).

    All contiguous and of one dtype. Rows beyond the last offset come out as zeros.
    """
    config = config or default_config(FORWARD, x_RD.dtype)
    rows, width = x_RD.shape
    experts, hidden = weight_EGD.shape[0], weight_EGD.shape[1] // 2
    hidden_RF = torch.empty(rows, hidden, dtype=x_RD.dtype, device=x_RD.device)
    gate_up_RG = torch.empty(rows, 2 * hidden, dtype=x_RD.dtype, device=x_RD.device)
    tiles = tiles_of(rows, experts, config.tiles["BLOCK_R"])
    grid = (tiles * triton.cdiv(hidden, config.tiles["BLOCK_F"]),)
    constants = {**expert_constants(experts), **config.options}
    tensors = (x_RD, weight_EGD, offsets_E, gate_up_RG, hidden_RF)
    _swiglu_forward[grid](*tensors, rows, width, hidden, **constants)
    return hidden_RF, gate_up_RG


def swiglu_dgrad(
    grad_RF: Tensor,
    gate_up_RG: Tensor,
    weight_EGD: Tensor,
    offsets_E: Tensor,
    config: Config | None = None,
) -> Tensor:
    """Gradient of x (R, D) from that of hidden (R, F) and the pre-activations (R, 2F)."""
    config = config or default_config(DGRAD, grad_RF.dtype)
    rows, hidden = grad_RF.shape
    experts, _, width = weight_EGD.shape
    out_RD = torch.empty(rows, width, dtype=grad_RF.dtype, device=grad_RF.device)
    tiles = tiles_of(rows, experts, config.tiles["BLOCK_R"])
    grid = (tiles * triton.cdiv(width, config.tiles["BLOCK_D"]),)
    constants = {**expert_constants(experts), **config.options}
    tensors = (grad_RF, gate_up_RG, weight_EGD, offsets_E, out_RD)
    _swiglu_dgrad[grid](*tensors, rows, width, hidden, **constants)
    return out_RD


def swiglu_wgrad(
    grad_RF: Tensor,
    gate_up_RG: Tensor,
    x_RD: Tensor,
    offsets_E: Tensor,
    config: Config | None = None,
) -> Tensor:
    """Gradient of the weight (E, 2F, D) from that of hidden (R, F); zeros without rows."""
    config = config or default_config(WGRAD, x_RD.dtype)
    experts, hidden, width = offsets_E.numel(), grad_RF.shape[1], x_RD.shape[1]
    out_EGD = torch.empty(experts, 2 * hidden, width, dtype=x_RD.dtype, device=x_RD.device)
    tiles = config.tiles
    grid = (experts * triton.cdiv(hidden, tiles["BLOCK_F"]) * triton.cdiv(width, tiles["BLOCK_D"]),)
    tensors = (grad_RF, gate_up_RG, x_RD, offsets_E, out_EGD)
    _swiglu_wgrad[grid](*tensors, width, hidden, **config.options)
    return out_EGD


def specimens() -> list[Specimen]:
    """Each kernel in each of its tiles, for 8 experts and for a dense layer."""
    found = [*specimens_of(_swiglu_wgrad, WGRAD, {}), *outer_specimens()]
    for experts in (8, 1):
        constants = expert_constants(experts)
        found += specimens_of(_swiglu_forward, FORWARD, constants)
        found += specimens_of(_swiglu_dgrad, DGRAD, constants)
        found += matmul_specimens(experts)
    return found

"""The SwiGLU MLP over rows sorted by expert: the products with SwiGLU and its derivative inside.

Shapes: R rows sorted by expert, E experts (1 for a dense layer), D model width, F hidden width,
G = 2F, gate first; N any width. offsets (E,) int32 is the end of each expert's rows.

On CUDA each operation is Triton kernels, on a CPU the formulas here, forward and backward. Rows
beyond the last offset give zeros; an expert without rows gets a zero gradient. `configs` are the
kernels' configurations, as `Kernels.configs_of` gives them; empty: their defaults.
Source: Shazeer 2020 (arXiv:2002.05202).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from sparkgpt.ops.kernels.specimen import config_of


def swiglu_mlp(
    x_RD: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, offsets_E: Tensor, configs: str = ""
) -> Tensor:
    """down[e] (silu(gate) * up) of each row by its expert: (R, D) -> (R, D).

    gate_up (E, 2F, D), down (E, D, F), both of x's dtype, and so are their gradients; products
    accumulate in float32. Differentiable in all but the offsets.
    """
    hidden_RF, _ = swiglu_hidden(x_RD, gate_up_EGD, offsets_E, configs)
    return swiglu_down(hidden_RF, down_EDF, offsets_E, configs)


def one_group(x_RD: Tensor) -> Tensor:
    """Offsets (1,) int32 that give every row to the one matrix of a dense layer."""
    return torch.full((1,), x_RD.shape[0], dtype=torch.int32, device=x_RD.device)


@custom_op("sparkgpt::swiglu_hidden", mutates_args=(), device_types="cpu")
def swiglu_hidden(
    x_RD: Tensor, weight_EGD: Tensor, offsets_E: Tensor, configs: str = ""
) -> tuple[Tensor, Tensor]:
    """silu(x w_gate^T) * (x w_up^T): (R, D), (E, 2F, D) -> hidden (R, F).

    Its second output, gate and up, is for the backward and has no gradient of its own: (R, 2F), on
    a CPU (2, R, F), since passes over halves of rows are slower there than over whole ones.
    """
    gate_RF, up_RF = gate_up_2RF = x_RD.new_empty(2, x_RD.shape[0], weight_EGD.shape[1] // 2)
    gate_EFD, up_EFD = weight_EGD.chunk(2, dim=1)
    _linear(x_RD, gate_EFD.mT, offsets_E, out_RN=gate_RF)
    _linear(x_RD, up_EFD.mT, offsets_E, out_RN=up_RF)
    return F.silu(gate_RF).mul_(up_RF), gate_up_2RF


@custom_op("sparkgpt::swiglu_hidden_backward", mutates_args=(), device_types="cpu")
def swiglu_hidden_backward(
    grad_RF: Tensor,
    gate_up: Tensor,
    x_RD: Tensor,
    weight_EGD: Tensor,
    offsets_E: Tensor,
    configs: str = "",
) -> tuple[Tensor, Tensor]:
    """Gradients of x (R, D) and of the weight (E, 2F, D) from that of hidden (R, F).

    With s = sigmoid(gate): d_gate = grad * up * s * (1 + gate * (1 - s)), d_up = grad * gate * s.
    """
    gate_RF, up_RF = gate_up
    d_up_RF = F.silu(gate_RF).mul_(grad_RF)
    d_gate_RF = torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF)
    d_weight_EGD, d_x_RD = torch.empty_like(weight_EGD), torch.empty_like(x_RD)
    halves = zip(
        (d_gate_RF, d_up_RF), weight_EGD.chunk(2, 1), d_weight_EGD.chunk(2, 1), strict=True
    )
    for beta, (d_RF, weight_EFD, d_weight_EFD) in enumerate(halves):
        _outer(d_RF, x_RD, offsets_E, d_weight_EFD)
        _linear(d_RF, weight_EFD, offsets_E, d_x_RD, beta)
    return d_x_RD, d_weight_EGD


@custom_op("sparkgpt::swiglu_down", mutates_args=(), device_types="cpu")
def swiglu_down(
    hidden_RF: Tensor, weight_EDF: Tensor, offsets_E: Tensor, configs: str = ""
) -> Tensor:
    """Rows of expert e times weight[e].T: (R, F), (E, D, F) -> (R, D)."""
    return _linear(hidden_RF, weight_EDF.mT, offsets_E)


@custom_op("sparkgpt::swiglu_down_backward", mutates_args=(), device_types="cpu")
def swiglu_down_backward(
    grad_RD: Tensor, hidden_RF: Tensor, weight_EDF: Tensor, offsets_E: Tensor, configs: str = ""
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden (R, F) and of the weight (E, D, F) from that of the output (R, D)."""
    d_weight_EDF = torch.empty_like(weight_EDF)
    _outer(grad_RD, hidden_RF, offsets_E, d_weight_EDF)
    return _linear(grad_RD, weight_EDF, offsets_E), d_weight_EDF


def _rows(x_RN: Tensor, offsets_E: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert, then those beyond the last offset."""
    ends = [0, *offsets_E.tolist(), x_RN.shape[0]]
    return x_RN.split([end - start for start, end in zip(ends[:-1], ends[1:], strict=True)])


def _linear(
    x_RK: Tensor, weight_EKN: Tensor, offsets_E: Tensor, out_RN: Tensor | None = None, beta: int = 0
) -> Tensor:
    """Into out, or a new tensor; with beta 1 added to it."""
    if out_RN is None:
        out_RN = x_RK.new_empty(x_RK.shape[0], weight_EKN.shape[2])
    *outs, beyond = _rows(out_RN, offsets_E)
    *rows, _ = _rows(x_RK, offsets_E)
    for x, weight_KN, out in zip(rows, weight_EKN, outs, strict=True):
        torch.addmm(out, x, weight_KN, beta=beta, out=out)
    beyond.zero_()
    return out_RN


def _outer(grad_RN: Tensor, x_RK: Tensor, offsets_E: Tensor, out_ENK: Tensor) -> None:
    *grads, _ = _rows(grad_RN, offsets_E)
    *rows, _ = _rows(x_RK, offsets_E)
    for grad, x, out in zip(grads, rows, out_ENK, strict=True):
        torch.mm(grad.T, x, out=out)


@swiglu_hidden.register_kernel("cuda")
def _(x_RD, weight_EGD, offsets_E, configs=""):
    from sparkgpt.ops.kernels import swiglu as kernels

    config = config_of(configs, "swiglu_forward")
    return kernels.swiglu_forward(x_RD.contiguous(), weight_EGD.contiguous(), offsets_E, config)


@swiglu_hidden_backward.register_kernel("cuda")
def _(grad_RF, gate_up_RG, x_RD, weight_EGD, offsets_E, configs=""):
    from sparkgpt.ops.kernels import swiglu as kernels

    dgrad, wgrad = (config_of(configs, name) for name in ("swiglu_dgrad", "swiglu_wgrad"))
    both = grad_RF.contiguous(), gate_up_RG
    d_x_RD = kernels.swiglu_dgrad(*both, weight_EGD.contiguous(), offsets_E, dgrad)
    return d_x_RD, kernels.swiglu_wgrad(*both, x_RD.contiguous(), offsets_E, wgrad)


@swiglu_down.register_kernel("cuda")
def _(hidden_RF, weight_EDF, offsets_E, configs=""):
    from sparkgpt.ops.kernels import grouped as kernels

    config = config_of(configs, "grouped_matmul")
    tensors = hidden_RF.contiguous(), weight_EDF.contiguous(), offsets_E
    return kernels.grouped_matmul(*tensors, config=config)


@swiglu_down_backward.register_kernel("cuda")
def _(grad_RD, hidden_RF, weight_EDF, offsets_E, configs=""):
    from sparkgpt.ops.kernels import grouped as kernels

    matmul, outer = (config_of(configs, n) for n in ("grouped_matmul_by_rows", "grouped_outer"))
    grad_RD, weight_EDF = grad_RD.contiguous(), weight_EDF.contiguous()
    d_hidden_RF = kernels.grouped_matmul(grad_RD, weight_EDF, offsets_E, True, matmul)
    return d_hidden_RF, kernels.grouped_outer(grad_RD, hidden_RF.contiguous(), offsets_E, outer)


@swiglu_hidden.register_fake
def _(x_RD, weight_EGD, offsets_E, configs=""):
    rows, hidden = x_RD.shape[0], weight_EGD.shape[1] // 2
    gate_up = (2, rows, hidden) if x_RD.device.type == "cpu" else (rows, 2 * hidden)
    return x_RD.new_empty(rows, hidden), x_RD.new_empty(gate_up)


@swiglu_hidden_backward.register_fake
def _(grad_RF, gate_up, x_RD, weight_EGD, offsets_E, configs=""):
    return x_RD.new_empty(x_RD.shape), weight_EGD.new_empty(weight_EGD.shape)


@swiglu_down.register_fake
def _(hidden_RF, weight_EDF, offsets_E, configs=""):
    return hidden_RF.new_empty(hidden_RF.shape[0], weight_EDF.shape[1])


@swiglu_down_backward.register_fake
def _(grad_RD, hidden_RF, weight_EDF, offsets_E, configs=""):
    return hidden_RF.new_empty(hidden_RF.shape), weight_EDF.new_empty(weight_EDF.shape)


def _save_hidden(ctx, inputs, output) -> None:
    *tensors, ctx.configs = inputs
    _, gate_up = output
    ctx.mark_non_differentiable(gate_up)
    ctx.save_for_backward(gate_up, *tensors)


def _hidden_backward(ctx, grad_RF, _):
    return *swiglu_hidden_backward(grad_RF, *ctx.saved_tensors, ctx.configs), None, None


def _save_down(ctx, inputs, output) -> None:
    *tensors, ctx.configs = inputs
    ctx.save_for_backward(*tensors)


def _down_backward(ctx, grad_RD):
    return *swiglu_down_backward(grad_RD, *ctx.saved_tensors, ctx.configs), None, None


swiglu_hidden.register_autograd(_hidden_backward, setup_context=_save_hidden)
swiglu_down.register_autograd(_down_backward, setup_context=_save_down)

"""Rows to experts and back in one pass each way: `experts.dispatch` and `experts.combine`, fused.

Shapes: T packed positions, D model width, k experts per position, R = T * k rows sorted by expert.
The functions on top are what a model calls; each is an operation that a compiler sees as one node,
with the formulas of its backward beside it. CUDA tensors go to `ops.kernels.dispatch`.
"""

import torch
from torch import Tensor

from sparkgpt.ops.experts import inverse_permutation


def fused_dispatch(x_TD: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    """(T, D) -> (R, D): each position's row copied to its k experts, sorted by expert.

    inverse (R,) int64 as `experts.sort_by_expert` returns it.
    """
    return torch.ops.sparkgpt.dispatch(x_TD, inverse_R, k)


def fused_combine(rows_RD: Tensor, weight_Tk: Tensor, inverse_R: Tensor) -> Tensor:
    """(R, D) expert outputs, (T, k) weights of that dtype -> (T, D): each position's weighted sum.

    Added in float32 and rounded once, where `experts.combine` rounds each product.
    """
    return torch.ops.sparkgpt.combine(rows_RD, weight_Tk, inverse_R)


@torch.library.custom_op("sparkgpt::dispatch", mutates_args=(), device_types="cpu")
def _dispatch(x_TD: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    # By gathering rows: scattering them is far slower on a CPU.
    return x_TD[inverse_permutation(inverse_R) // k]


@torch.library.custom_op("sparkgpt::dispatch_backward", mutates_args=(), device_types="cpu")
def _dispatch_backward(grad_RD: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    return _by_choice(grad_RD, inverse_R, k).float().sum(1).to(grad_RD.dtype)


@torch.library.custom_op("sparkgpt::combine", mutates_args=(), device_types="cpu")
def _combine(rows_RD: Tensor, weight_Tk: Tensor, inverse_R: Tensor) -> Tensor:
    y_TkD = _by_choice(rows_RD, inverse_R, weight_Tk.shape[1]).float()
    return (y_TkD * weight_Tk.float()[..., None]).sum(1).to(rows_RD.dtype)


@torch.library.custom_op("sparkgpt::combine_backward", mutates_args=(), device_types="cpu")
def _combine_backward(
    grad_TD: Tensor, rows_RD: Tensor, weight_Tk: Tensor, inverse_R: Tensor
) -> tuple[Tensor, Tensor]:
    grad_T1D = grad_TD.float()[:, None]
    scaled_TkD = (grad_T1D * weight_Tk.float()[..., None]).to(rows_RD.dtype)
    grad_rows_RD = scaled_TkD.flatten(0, 1)[inverse_permutation(inverse_R)]
    y_TkD = _by_choice(rows_RD, inverse_R, weight_Tk.shape[1]).float()
    return grad_rows_RD, (grad_T1D * y_TkD).sum(-1).to(weight_Tk.dtype)


def _by_choice(rows_RD: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    """(R, D) in expert order -> (T, k, D)."""
    return rows_RD[inverse_R].view(-1, k, rows_RD.shape[1])


@_dispatch.register_kernel("cuda")
def _(x_TD, inverse_R, k):
    from sparkgpt.ops.kernels import dispatch as kernels

    return kernels.dispatch(x_TD, inverse_R, k)


@_dispatch_backward.register_kernel("cuda")
def _(grad_RD, inverse_R, k):
    from sparkgpt.ops.kernels import dispatch as kernels

    return kernels.combine(grad_RD, None, inverse_R, k)


@_combine.register_kernel("cuda")
def _(rows_RD, weight_Tk, inverse_R):
    from sparkgpt.ops.kernels import dispatch as kernels

    return kernels.combine(rows_RD, weight_Tk, inverse_R, weight_Tk.shape[1])


@_combine_backward.register_kernel("cuda")
def _(grad_TD, rows_RD, weight_Tk, inverse_R):
    from sparkgpt.ops.kernels import dispatch as kernels

    return kernels.combine_backward(grad_TD, rows_RD, weight_Tk, inverse_R)


@_dispatch.register_fake
def _(x_TD, inverse_R, k):
    return x_TD.new_empty(x_TD.shape[0] * k, x_TD.shape[1])


@_dispatch_backward.register_fake
def _(grad_RD, inverse_R, k):
    return grad_RD.new_empty(grad_RD.shape[0] // k, grad_RD.shape[1])


@_combine.register_fake
def _(rows_RD, weight_Tk, inverse_R):
    return rows_RD.new_empty(weight_Tk.shape[0], rows_RD.shape[1])


@_combine_backward.register_fake
def _(grad_TD, rows_RD, weight_Tk, inverse_R):
    return rows_RD.new_empty(rows_RD.shape), weight_Tk.new_empty(weight_Tk.shape)


def _save_dispatch(ctx, inputs, output) -> None:
    _, inverse_R, ctx.k = inputs
    ctx.save_for_backward(inverse_R)


def _dispatch_gradients(ctx, grad_RD: Tensor):
    return torch.ops.sparkgpt.dispatch_backward(grad_RD, *ctx.saved_tensors, ctx.k), None, None


def _save_combine(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _combine_gradients(ctx, grad_TD: Tensor):
    return *torch.ops.sparkgpt.combine_backward(grad_TD, *ctx.saved_tensors), None


_dispatch.register_autograd(_dispatch_gradients, setup_context=_save_dispatch)
_combine.register_autograd(_combine_gradients, setup_context=_save_combine)

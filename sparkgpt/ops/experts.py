"""Gather-only dispatch to experts and the grouped linear map over their rows.

Shapes: T packed positions, D model width, E experts, k experts per position, R = T * k rows sorted
by expert, F output width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sort_by_expert(expert_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable order of the T * k (position, choice) rows by expert.

    expert (T, k) int64 -> order (R,) int64: sorted row -> flat (position, choice); inverse (R,):
    flat -> sorted row; offsets (E,) int32: end of each expert's rows. Stable, so equal input gives
    equal bits.
    """
    flat_R = expert_Tk.flatten()
    order_R = torch.argsort(flat_R, stable=True)
    inverse_R = inverse_permutation(order_R)
    experts_E = torch.arange(num_experts, device=flat_R.device)
    counts_E = (flat_R[:, None] == experts_E).sum(0)
    return order_R, inverse_R, counts_E.cumsum(0).to(torch.int32)


def inverse_permutation(order_R: Tensor) -> Tensor:
    """The permutation (R,) int64 that undoes one, each number below R once."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse_R


class _Dispatch(torch.autograd.Function):
    """Rows of x in expert order. The backward gathers and sums k rows per position: no atomics."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.k = k
        return x_TD[order_R // k]

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        (inverse_R,) = ctx.saved_tensors
        positions = inverse_R.numel() // ctx.k
        grad_TkD = grad_RD[inverse_R].view(positions, ctx.k, grad_RD.shape[-1])
        return grad_TkD.sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """Expert rows back in (position, choice) order: a permutation, its backward is its inverse."""

    @staticmethod
    def forward(ctx, y_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return y_RD[inverse_R]

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        (order_R,) = ctx.saved_tensors
        return grad_RD[order_R], None, None


def dispatch(x_TD: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    """(T, D) -> (R, D): each position's row copied to its k experts, sorted by expert."""
    return _Dispatch.apply(x_TD, order_R, inverse_R, k)


def combine(y_RD: Tensor, weight_Tk: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """(R, D) expert outputs, (T, k) weights -> (T, D): the weighted sum over each position's k."""
    y_TkD = _Collect.apply(y_RD, order_R, inverse_R).view(*weight_Tk.shape, y_RD.shape[-1])
    return (y_TkD * weight_Tk[..., None]).sum(1)


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Rows of expert e times weight[e].T: (R, D), (E, F, D), offsets (E,) int32 -> (R, F).

    offsets[-1] must equal R. An expert without rows gets zero gradients. On CUDA this is torch's
    grouped_mm (offsets stay on the device), on a CPU one matmul per expert.
    """
    if x_RD.is_cuda:
        return F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=offsets_E)
    return CPU_LOOPS["grouped_linear"](x_RD, weight_EFD, offsets_E)


def _matmul_per_expert(x_RD: Tensor, weight_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    ends = offsets_E.tolist()
    counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    rows = zip(x_RD.split(counts), weight_EFD.unbind(0), strict=True)
    return torch.cat([part @ weight_FD.T for part, weight_FD in rows])


CPU_LOOPS = {"grouped_linear": _matmul_per_expert}

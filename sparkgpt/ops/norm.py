"""RMSNorm.

Shapes: T packed positions, D normalised width.
"""

import torch
from torch import Tensor

UNCAST = (torch.float32, torch.float64)  # computed in as they are


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """RMSNorm as Qwen3 computes it: in float32, cast to x's dtype, *then* times the gain.

    x (..., D) any float dtype, gain (D,) -> (..., D) in x's dtype. torch's fused rms_norm
    multiplies before the cast, which gives other bits in bfloat16. Source: Zhang and Sennrich 2019
    (arXiv:1910.07467); order of casts as in transformers' Qwen3RMSNorm.
    """
    if x_TD.device.type == "cpu" and x_TD.dtype == gain_D.dtype and x_TD.dtype in UNCAST:
        return _RMSNorm.apply(x_TD, gain_D, eps)
    x32_TD = x_TD.float()
    scale_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    return gain_D.to(x_TD.dtype) * (x32_TD * scale_T1).to(x_TD.dtype)


class _RMSNorm(torch.autograd.Function):
    """Where nothing is cast, with a backward in few passes: half the time of autograd's own."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        normed_TD, scale_T1 = normalize(x_TD, eps)
        ctx.save_for_backward(normed_TD, scale_T1, gain_D)
        return normed_TD * gain_D

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TD: Tensor):
        normed_TD, scale_T1, gain_D = ctx.saved_tensors
        dgain_D = (grad_TD * normed_TD).reshape(-1, len(gain_D)).sum(0)
        return normalize_backward(grad_TD * gain_D, normed_TD, scale_T1), dgain_D, None


def normalize(x_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) (..., D), and its factor 1 / rms(x) (..., 1), in x's dtype, float32 at least."""
    norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
    scale_T1 = norm_T1.square_().div_(x_TD.shape[-1]).add_(eps).rsqrt_()
    return x_TD * scale_T1, scale_T1


def normalize_backward(grad_TD: Tensor, normed_TD: Tensor, scale_T1: Tensor) -> Tensor:
    """The gradient of x from m, that of n = x / rms(x), which it overwrites.

    With s = 1 / rms(x), dx = s (m - n mean(m n)).
    """
    along_T1 = torch.linalg.vecdot(grad_TD, normed_TD)[..., None] / -normed_TD.shape[-1]
    return grad_TD.addcmul_(normed_TD, along_T1).mul_(scale_T1)

"""Muon: momentum, orthogonalised by a Newton-Schulz iteration.

Shapes: B matrices in a batch, M rows, N columns. Source: Jordan et al. 2024
(https://kellerjordan.github.io/posts/muon/); constants and scaling as in torch.optim.Muon.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7  # keeps an all-zero gradient at zero instead of 0/0


def orthogonalize(g_BMN: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration towards U V^T of each matrix g = U S V^T.

    (B, M, N) -> (B, M, N), same dtype: float32 on a CPU, computed in bfloat16 on CUDA. Singular
    values end within about 0.7 to 1.2; a zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    x_BMN = g_BMN.bfloat16() if g_BMN.is_cuda else g_BMN
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    if tall:
        x_BMN = x_BMN.mT
    x_BMN = x_BMN / x_BMN.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram_BMM = x_BMN @ x_BMN.mT
        poly_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, poly_BMM, x_BMN, beta=a)
    return (x_BMN.mT if tall else x_BMN).to(g_BMN.dtype)


def directions_by_kernels(
    gradients: list[Tensor],
    averages: list[Tensor],
    momentum: float,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Momentum, look-ahead and `orthogonalize` of float32 parameters of one shape (..., M, N).

    Updates `averages` in place; returns (B, M, N) in `dtype`. The norm is a factor of the first
    iteration's products, so that no pass is spent on dividing by it.
    """
    from sparkgpt.ops.kernels.newton_schulz import gemm, look_ahead

    a, b, c = COEFFICIENTS
    x_BMN, squares_BP = look_ahead(gradients, averages, momentum, dtype)
    norm_B = squares_BP.sum(1).sqrt().clamp(min=EPS)
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    scale_B, scale2_B = 1 / norm_B, 1 / norm_B.square()
    for _ in range(ITERATIONS):
        sides = (x_BMN.mT, x_BMN) if tall else (x_BMN, x_BMN.mT)
        gram_BMM = gemm(*sides, scale_B=scale2_B, symmetric=True)
        poly_BMM = gemm(gram_BMM, gram_BMM, alpha=c, c_BMN=gram_BMM, beta=b, symmetric=True)
        sides = (x_BMN, poly_BMM) if tall else (poly_BMM, x_BMN)
        x_BMN = gemm(*sides, c_BMN=x_BMN, beta=a, scale_B=scale_B)
        scale_B = scale2_B = None
    return x_BMN


class Muon(torch.optim.Optimizer):
    """Muon over 2-D matrices and 3-D stacks of matrices (each matrix of a stack on its own).

    momentum is an exponential average with Nesterov look-ahead; the update is scaled by
    sqrt(max(1, rows / columns)); no weight decay. State: one float32 `momentum` per parameter.
    `kernels`: by our own Triton kernels where there are any for the device.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, kernels: bool = False):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.kernels = kernels

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group["lr"], group["momentum"])

    def _step_alike(self, parameters: list[Tensor], lr: float, momentum: float) -> None:
        """One step for parameters of one shape, their matrices in one batch."""
        shape = parameters[0].shape
        if self.kernels and parameters[0].is_cuda:
            gradients = [parameter.grad for parameter in parameters]
            averages = [self._average(parameter) for parameter in parameters]
            directions_BMN = directions_by_kernels(gradients, averages, momentum)
        else:
            looks = [self._look_ahead(p, momentum) for p in parameters]
            directions_BMN = orthogonalize(torch.stack(looks).view(-1, *shape[-2:]))
        scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
        for parameter, direction in zip(parameters, directions_BMN.view(-1, *shape), strict=True):
            parameter.add_(direction, alpha=-lr * scale)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state["momentum"]

    def _look_ahead(self, parameter: Tensor, momentum: float) -> Tensor:
        average = self._average(parameter).lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)

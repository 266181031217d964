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
        looks = [self._look_ahead(p, momentum) for p in parameters]
        batch_BMN = torch.stack(looks).view(-1, *shape[-2:])
        update = orthogonalize(batch_BMN).view(-1, *shape)
        scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
        for parameter, direction in zip(parameters, update, strict=True):
            parameter.add_(direction, alpha=-lr * scale)

    def _look_ahead(self, parameter: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        average = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)

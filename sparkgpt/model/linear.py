"""The layers that hold weights: float32 masters, computing in their input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkgpt.ops.norm import rms_norm


class Linear(nn.Module):
    """x (..., in) -> (..., out) without a bias; the weight (out, in) is cast to x's dtype.

    Explicit casts instead of autocast: what is computed in which precision stands in the code.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Holds the gain (width,) of an RMSNorm; see `sparkgpt.ops.norm.rms_norm`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

"""RMSNorm.

Shapes: T packed positions, D normalised width.
"""

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """RMSNorm as Qwen3 computes it: in float32, cast to x's dtype, *then* times the gain.

    x (..., D) any float dtype, gain (D,) -> (..., D) in x's dtype. torch's fused rms_norm
    multiplies before the cast, which gives other bits in bfloat16. Source: Zhang and Sennrich 2019
    (arXiv:1910.07467); order of casts as in transformers' Qwen3RMSNorm.
    """
    x32_TD = x_TD.float()
    scale_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    return gain_D.to(x_TD.dtype) * (x32_TD * scale_T1).to(x_TD.dtype)

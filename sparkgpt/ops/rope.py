"""Rotary position embedding, rotate-half form.

Shapes: T packed positions, N heads, H head dimension.
"""

import torch
from torch import Tensor


def rope_tables(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, H) in `dtype`, for integer positions (T,).

    Angles are computed in float32 and cast last, as transformers does. Source: Su et al. 2021
    (arXiv:2104.09864).
    """
    exponent = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32)
    frequency = 1.0 / theta ** (exponent / head_dim)
    angle = positions_T.float()[:, None] * frequency
    angle_TH = torch.cat((angle, angle), dim=-1)
    return angle_TH.cos().to(dtype), angle_TH.sin().to(dtype)


def apply_rope(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate each head of x (T, N, H) by the tables of `rope_tables`; same shape and dtype."""
    low, high = x_TNH.chunk(2, dim=-1)
    turned_TNH = torch.cat((-high, low), dim=-1)
    return x_TNH * cos_TH[:, None] + turned_TNH * sin_TH[:, None]

"""Query and key heads normed (RMSNorm) and rotated (RoPE) straight from the qkv buffer.

Shapes: T packed positions, N query heads, K key/value heads, A = N + 2K rows of a position in the
order q, k, v, B = N + K of them normed and rotated, H head dimension.
"""

import torch
from torch import Tensor

from sparkgpt.ops.norm import normalize, normalize_backward


def qk_rope(
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), normed and rotated, in qkv's dtype, and v (T, K, H), a view of qkv.

    qkv (T, A, H) contiguous, gains (H,) float32, tables (T, H) of `rope_tables`: the second half of
    each row equals the first. Computes in float32 at least and rounds once, at the end, where
    `rms_norm` and `apply_rope` round after each step. The backward writes qkv's gradient whole, v's
    part included. Sources: `sparkgpt.ops.norm`, `sparkgpt.ops.rope`.
    """
    return _QKRope.apply(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps)


class _QKRope(torch.autograd.Function):
    """Not the operator's own autograd: v is a view of the input, which no operator may return."""

    @staticmethod
    def forward(ctx, qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps):
        ctx.save_for_backward(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH)
        ctx.eps = eps
        q_TNH, k_TKH = qk_rope_forward(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps)
        return q_TNH, k_TKH, qkv_TAH[:, -kv_heads:]

    @staticmethod
    def backward(ctx, dq_TNH, dk_TKH, dv_TKH):
        grads = qk_rope_backward(dq_TNH, dk_TKH, dv_TKH, *ctx.saved_tensors, ctx.eps)
        return *grads, None, None, None, None


@torch.library.custom_op("sparkgpt::qk_rope", mutates_args=(), device_types="cpu")
def qk_rope_forward(
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(q, k) of `qk_rope`, without an autograd formula."""
    normed_TBH, _ = normalize(_wide(qkv_TAH[:, :-kv_heads]), eps)
    normed_TBH *= _gains(q_gain_H, k_gain_H, normed_TBH.shape[1] - kv_heads, kv_heads)
    pairs = _turned(normed_TBH, cos_TH, sin_TH)
    parts = (pairs[:, :-kv_heads], pairs[:, -kv_heads:])
    return tuple(torch.cat((x.real, x.imag), -1).to(qkv_TAH.dtype) for x in parts)


@qk_rope_forward.register_kernel("cuda")
def _(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps):
    from sparkgpt.ops.kernels import qk_rope as kernels

    return kernels.forward(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps)


@qk_rope_forward.register_fake
def _(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps):
    tokens, rows, head_dim = qkv_TAH.shape
    q_TNH = qkv_TAH.new_empty(tokens, rows - 2 * kv_heads, head_dim)
    return q_TNH, qkv_TAH.new_empty(tokens, kv_heads, head_dim)


@torch.library.custom_op("sparkgpt::qk_rope_backward", mutates_args=(), device_types="cpu")
def qk_rope_backward(
    dq_TNH: Tensor,
    dk_TKH: Tensor,
    dv_TKH: Tensor,
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv (T, A, H) and of the two gains (H,): the rotation's transpose turns back,
    `normalize_backward` does the rest."""
    heads, kv_heads = dq_TNH.shape[1], dk_TKH.shape[1]
    normed_TBH, scale_TB1 = normalize(_wide(qkv_TAH[:, :-kv_heads]), eps)
    grad_TAH = torch.cat((dq_TNH, dk_TKH, dv_TKH), 1)
    pairs = _turned(_wide(grad_TAH[:, :-kv_heads]), cos_TH, -sin_TH)
    turned_TBH = torch.cat((pairs.real, pairs.imag), -1)
    dgain_BH = (turned_TBH * normed_TBH).sum(0)
    dgains = (part_BH.sum(0) for part_BH in dgain_BH.split((heads, kv_heads)))
    turned_TBH *= _gains(q_gain_H, k_gain_H, heads, kv_heads)
    grad_TAH[:, :-kv_heads] = normalize_backward(turned_TBH, normed_TBH, scale_TB1)
    return grad_TAH, *(dgain_H.to(q_gain_H.dtype) for dgain_H in dgains)


@qk_rope_backward.register_kernel("cuda")
def _(dq_TNH, dk_TKH, dv_TKH, qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, eps):
    from sparkgpt.ops.kernels import qk_rope as kernels

    tables = (q_gain_H, k_gain_H, cos_TH, sin_TH)
    return kernels.backward(dq_TNH, dk_TKH, dv_TKH, qkv_TAH, *tables, eps)


@qk_rope_backward.register_fake
def _(dq_TNH, dk_TKH, dv_TKH, qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, eps):
    return torch.empty_like(qkv_TAH), torch.empty_like(q_gain_H), torch.empty_like(k_gain_H)


def split_heads(qkv_TAH: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q (T, N, H), k and v (T, K, H)."""
    return qkv_TAH.split((qkv_TAH.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def _wide(x_TBH: Tensor) -> Tensor:
    return x_TBH.to(torch.promote_types(x_TBH.dtype, torch.float32))


def _gains(q_gain_H: Tensor, k_gain_H: Tensor, heads: int, kv_heads: int) -> Tensor:
    return torch.stack([q_gain_H] * heads + [k_gain_H] * kv_heads)


def _turned(x_TBH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotated, the pairs (h, h + H / 2) as complex numbers (T, B, H / 2)."""
    half = x_TBH.shape[-1] // 2
    tables = (table_TH[:, None, :half].to(x_TBH.dtype) for table_TH in (cos_TH, sin_TH))
    return torch.complex(*x_TBH.chunk(2, -1)).mul_(torch.complex(*tables))

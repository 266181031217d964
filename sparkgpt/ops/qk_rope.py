"""Query and key heads normed (RMSNorm) and rotated (RoPE) straight from the qkv buffer.

Shapes: T packed positions, N query heads, K key/value heads, A = N + 2K rows of a position in the
order q, k, v, H head dimension.
"""

import torch
from torch import Tensor


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


@torch.library.custom_op("sparkgpt::qk_rope", mutates_args=())
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
    if qkv_TAH.is_cuda:
        from sparkgpt.ops.kernels import qk_rope as kernels

        return kernels.forward(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps)
    q_TNH, k_TKH, _ = split_heads(qkv_TAH, kv_heads)
    q_TNH = norm_rope(q_TNH, q_gain_H, cos_TH, sin_TH, eps)
    return q_TNH, norm_rope(k_TKH, k_gain_H, cos_TH, sin_TH, eps)


@qk_rope_forward.register_fake
def _(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps):
    tokens, rows, head_dim = qkv_TAH.shape
    q_TNH = qkv_TAH.new_empty(tokens, rows - 2 * kv_heads, head_dim)
    return q_TNH, qkv_TAH.new_empty(tokens, kv_heads, head_dim)


@torch.library.custom_op("sparkgpt::qk_rope_backward", mutates_args=())
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
    """Gradients of qkv (T, A, H) and of the two gains (H,)."""
    if qkv_TAH.is_cuda:
        from sparkgpt.ops.kernels import qk_rope as kernels

        tables = (q_gain_H, k_gain_H, cos_TH, sin_TH)
        return kernels.backward(dq_TNH, dk_TKH, dv_TKH, qkv_TAH, *tables, eps)
    q_TNH, k_TKH, _ = split_heads(qkv_TAH, dk_TKH.shape[1])
    dq_TNH, dq_gain_H = norm_rope_backward(dq_TNH, q_TNH, q_gain_H, cos_TH, sin_TH, eps)
    dk_TKH, dk_gain_H = norm_rope_backward(dk_TKH, k_TKH, k_gain_H, cos_TH, sin_TH, eps)
    return torch.cat((dq_TNH, dk_TKH, dv_TKH), 1), dq_gain_H, dk_gain_H


@qk_rope_backward.register_fake
def _(dq_TNH, dk_TKH, dv_TKH, qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, eps):
    return torch.empty_like(qkv_TAH), torch.empty_like(q_gain_H), torch.empty_like(k_gain_H)


def split_heads(qkv_TAH: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q (T, N, H), k and v (T, K, H)."""
    return qkv_TAH.split((qkv_TAH.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def norm_rope(x_TNH: Tensor, gain_H: Tensor, cos_TH: Tensor, sin_TH: Tensor, eps: float) -> Tensor:
    """The reference: x / rms(x) times the gain, rotated, in float32 at least; in x's dtype."""
    normed_TNH, _ = _normed(x_TNH, eps)
    scaled_TNH = normed_TNH * gain_H
    low, high = scaled_TNH.chunk(2, -1)
    cos_T1H, sin_T1H = (table_TH.to(scaled_TNH.dtype)[:, None] for table_TH in (cos_TH, sin_TH))
    turned_TNH = scaled_TNH * cos_T1H + torch.cat((-high, low), -1) * sin_T1H
    return turned_TNH.to(x_TNH.dtype)


def norm_rope_backward(
    grad_TNH: Tensor, x_TNH: Tensor, gain_H: Tensor, cos_TH: Tensor, sin_TH: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the gain, in the gain's.

    The rotation's transpose turns back; with n = x s, s = 1 / rms(x), and m the gradient of n,
    dx = s (m - n mean(m n)).
    """
    normed_TNH, scale_TN1 = _normed(x_TNH, eps)
    cos_T1H, sin_T1H = (table_TH.to(normed_TNH.dtype)[:, None] for table_TH in (cos_TH, sin_TH))
    grad_TNH = grad_TNH.to(normed_TNH.dtype)
    low, high = (grad_TNH * sin_T1H).chunk(2, -1)
    turned_TNH = grad_TNH * cos_T1H + torch.cat((high, -low), -1)
    dgain_H = (turned_TNH * normed_TNH).sum((0, 1)).to(gain_H.dtype)
    turned_TNH = turned_TNH * gain_H
    along_TN1 = (turned_TNH * normed_TNH).mean(-1, keepdim=True)
    return ((turned_TNH - normed_TNH * along_TN1) * scale_TN1).to(x_TNH.dtype), dgain_H


def _normed(x_TNH: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TNH = x_TNH.to(torch.promote_types(x_TNH.dtype, torch.float32))
    scale_TN1 = torch.rsqrt(x_TNH.square().mean(-1, keepdim=True) + eps)
    return x_TNH * scale_TN1, scale_TN1

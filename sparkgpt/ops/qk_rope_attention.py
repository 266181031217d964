"""Query and key norm, RoPE and attention as one operator of the qkv buffer.

Its backward turns the gradients of normed, rotated queries and keys back inside attention's own
kernels, so that they are never in memory: it writes the gradient of qkv and nothing else of size.

Shapes: T packed positions, N query heads, K key/value heads, A = N + 2K rows of a position in the
order q, k, v, H head dimension, S = segments + 1 entries of `cu_seqlens`.
"""

import torch
from torch import Tensor

from sparkgpt.ops import qk_rope, varlen
from sparkgpt.ops.kernels.specimen import config_of


def qk_rope_attention(
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    cu_seqlens_S: Tensor,
    kv_heads: int,
    eps: float,
    configs: str = "",
) -> Tensor:
    """`varlen_attention` of what `qk_rope` makes of qkv (T, A, H): (T, N, H) in its dtype.

    Arguments, precision and sources as theirs; `configs` as of `varlen_forward`.
    """
    tables = (q_gain_H, k_gain_H, cos_TH, sin_TH)
    return fused_forward(qkv_TAH, *tables, cu_seqlens_S, kv_heads, eps, configs)[0]


@torch.library.custom_op("sparkgpt::qk_rope_attention", mutates_args=(), device_types="cpu")
def fused_forward(
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    cu_seqlens_S: Tensor,
    kv_heads: int,
    eps: float,
    configs: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and, for the backward alone, the softmax's (N, T) and q and k as attention saw
    them."""
    tables = (q_gain_H, k_gain_H, cos_TH, sin_TH)
    q_TNH, k_TKH = qk_rope.qk_rope_forward(qkv_TAH, *tables, kv_heads, eps)
    v_TKH = qkv_TAH[:, -kv_heads:]
    return *varlen.reference(q_TNH, k_TKH, v_TKH, cu_seqlens_S), q_TNH, k_TKH


@fused_forward.register_kernel("cuda")
def _(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, cu_seqlens_S, kv_heads, eps, configs=""):
    from sparkgpt.ops.kernels import attention
    from sparkgpt.ops.kernels.qk_rope import forward

    q_TNH, k_TKH = forward(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, kv_heads, eps)
    v_TKH = qk_rope.split_heads(qkv_TAH, kv_heads)[2]
    config = config_of(configs, "forward")
    return *attention.forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S, config), q_TNH, k_TKH


@fused_forward.register_fake
def _(qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, cu_seqlens_S, kv_heads, eps, configs=""):
    tokens, rows, head_dim = qkv_TAH.shape
    q_TNH, k_TKH, _ = qk_rope.split_heads(qkv_TAH, kv_heads)
    wide = torch.promote_types(qkv_TAH.dtype, torch.float32)
    lse_NT = qkv_TAH.new_empty(rows - 2 * kv_heads, tokens, dtype=wide)
    return q_TNH.new_empty(q_TNH.shape), lse_NT, *(x.new_empty(x.shape) for x in (q_TNH, k_TKH))


@torch.library.custom_op(
    "sparkgpt::qk_rope_attention_backward", mutates_args=(), device_types="cpu"
)
def fused_backward(
    dout_TNH: Tensor,
    qkv_TAH: Tensor,
    q_gain_H: Tensor,
    k_gain_H: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    cu_seqlens_S: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    eps: float,
    configs: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv (T, A, H) and of the two gains (H,)."""
    saved = (q_TNH, k_TKH, qkv_TAH[:, -k_TKH.shape[1] :], out_TNH, lse_NT)
    grads = varlen.reference_backward(dout_TNH, *saved, cu_seqlens_S)
    tables = (q_gain_H, k_gain_H, cos_TH, sin_TH)
    return qk_rope.qk_rope_backward(*grads, qkv_TAH, *tables, eps)


@fused_backward.register_kernel("cuda")
def _(
    dout_TNH, qkv_TAH, q_gain_H, k_gain_H, cos_TH, sin_TH, cu_seqlens_S, out_TNH, lse_NT, q_TNH,
    k_TKH, eps, configs="",
):  # fmt: skip
    from sparkgpt.ops.kernels import attention_backward as kernels

    chosen = config_of(configs, "fused_queries"), config_of(configs, "fused_keys")
    saved = (qkv_TAH, q_TNH, k_TKH, out_TNH, lse_NT)
    gains, tables = (q_gain_H, k_gain_H), (cos_TH, sin_TH)
    return kernels.fused_backward(dout_TNH, *saved, gains, tables, cu_seqlens_S, eps, chosen)


@fused_backward.register_fake
def _(dout_TNH, qkv_TAH, q_gain_H, k_gain_H, *_):
    return tuple(torch.empty_like(x) for x in (qkv_TAH, q_gain_H, k_gain_H))


def _save(ctx, inputs, output):
    *tensors, _, ctx.eps, ctx.configs = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout_TNH, *_):
    grads = fused_backward(dout_TNH, *ctx.saved_tensors, ctx.eps, ctx.configs)
    return *grads, *(None,) * 6


fused_forward.register_autograd(_backward, setup_context=_save)

"""Our own causal attention over packed documents: back end "triton" of `sparkgpt.ops.attention`.

Shapes: T packed positions, N query heads, K key/value heads, G = N / K queries per key/value head,
H head dimension, S = segments + 1 entries of `cu_seqlens`; in the reference, n positions of one
document.
"""

import math

import torch
from torch import Tensor

from sparkgpt.ops.kernels.specimen import config_of

HEAD_DIMS = (64, 128)  # of the kernels


@torch.library.custom_op("sparkgpt::varlen_attention", mutates_args=(), device_types="cpu")
def varlen_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens_S: Tensor, configs: str = ""
) -> tuple[Tensor, Tensor]:
    """Output (T, N, H) in q's dtype and, for the backward alone, base-2 logarithms of the softmax's
    sums (N, T), in float32 at least; arguments as of `varlen_attention`.

    On CUDA bfloat16, H 64 or 128, and `configs` the kernels' configurations as `Kernels.configs_of`
    gives them; empty: their defaults. Sources: online softmax, Milakov and Gimelshein 2018
    (arXiv:1805.02867); its backward by tiles, Dao et al. 2022 (arXiv:2205.14135).
    """
    return reference(q_TNH, k_TKH, v_TKH, cu_seqlens_S)


@varlen_forward.register_kernel("cuda")
def _(q_TNH, k_TKH, v_TKH, cu_seqlens_S, configs=""):
    from sparkgpt.ops.kernels import attention as kernels

    return kernels.forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S, config_of(configs, "forward"))


@varlen_forward.register_fake
def _(q_TNH, k_TKH, v_TKH, cu_seqlens_S, configs=""):
    tokens, heads, _ = q_TNH.shape
    lse_NT = q_TNH.new_empty(heads, tokens, dtype=torch.promote_types(q_TNH.dtype, torch.float32))
    return q_TNH.new_empty(q_TNH.shape), lse_NT


@torch.library.custom_op("sparkgpt::varlen_attention_backward", mutates_args=(), device_types="cpu")
def varlen_backward(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    cu_seqlens_S: Tensor,
    configs: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    return reference_backward(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_seqlens_S)


@varlen_backward.register_kernel("cuda")
def _(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_seqlens_S, configs=""):
    from sparkgpt.ops.kernels import attention_backward as kernels

    chosen = config_of(configs, "queries"), config_of(configs, "keys")
    saved = (q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_seqlens_S)
    return kernels.backward(dout_TNH, *saved, chosen)


@varlen_backward.register_fake
def _(dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, cu_seqlens_S, configs=""):
    return tuple(x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKH))


def _save(ctx, inputs, output):
    *qkv, cu_seqlens_S, ctx.configs = inputs
    ctx.save_for_backward(*qkv, *output, cu_seqlens_S)
    ctx.set_materialize_grads(False)  # the logarithms' gradient: none


def _backward(ctx, dout_TNH, _):
    return *varlen_backward(dout_TNH, *ctx.saved_tensors, ctx.configs), None, None


varlen_forward.register_autograd(_backward, setup_context=_save)


def reference(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens_S: Tensor
) -> tuple[Tensor, Tensor]:
    """`varlen_forward` one document at a time, in float32 at least."""
    outs, sums = [], []
    for q_KGnH, k_K1nH, v_K1nH in _documents(cu_seqlens_S, k_TKH.shape[1], q_TNH, k_TKH, v_TKH):
        scores_KGnn = _scores(q_KGnH, k_K1nH)
        top_KGn1 = scores_KGnn.amax(-1, keepdim=True)
        weights_KGnn = (scores_KGnn - top_KGn1).exp2()
        total_KGn1 = weights_KGnn.sum(-1, keepdim=True)
        outs.append(_rows(weights_KGnn / total_KGn1 @ v_K1nH, q_TNH))
        sums.append((top_KGn1 + total_KGn1.log2())[..., 0].flatten(0, 1))
    return torch.cat(outs), torch.cat(sums, 1)


def reference_backward(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    cu_seqlens_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients. With weights w = 2 ** (s - lse) of scores s = q k * H ** -0.5 * log2(e) and
    each row's d = out . dout: dv = w dout, ds = w (dout v - d), dq = ds k * H ** -0.5, dk likewise.
    """
    kv_heads, grads = k_TKH.shape[1], []
    by_row = (dout_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT.T[..., None])
    for dout, q, k, v, out, lse in _documents(cu_seqlens_S, kv_heads, *by_row):
        weights_KGnn = (_scores(q, k) - lse).exp2()
        delta_KGn1 = (out * dout).sum(-1, keepdim=True)
        dscores_KGnn = weights_KGnn * (dout @ v.mT - delta_KGn1) * q.shape[-1] ** -0.5
        dk_K1nH = (dscores_KGnn.mT @ q).sum(1, keepdim=True)
        dv_K1nH = (weights_KGnn.mT @ dout).sum(1, keepdim=True)
        wide = (dscores_KGnn @ k, dk_K1nH, dv_K1nH)
        grads.append([_rows(*pair) for pair in zip(wide, (q_TNH, k_TKH, v_TKH), strict=True)])
    return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))


def _documents(cu_seqlens_S: Tensor, kv_heads: int, *by_row: Tensor):
    """Each document's rows of tensors (T, heads, ...), as (K, heads / K, n, ...) and wide."""
    for parts in zip(*(x.split(cu_seqlens_S.diff().tolist()) for x in by_row), strict=True):
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        yield tuple(x.to(wide).transpose(0, 1).unflatten(0, (kv_heads, -1)) for x in parts)


def _scores(q_KGnH: Tensor, k_K1nH: Tensor) -> Tensor:
    scores_KGnn = q_KGnH @ k_K1nH.mT * (q_KGnH.shape[-1] ** -0.5 * math.log2(math.e))
    return scores_KGnn.masked_fill(~torch.ones_like(scores_KGnn, dtype=bool).tril(), -torch.inf)


def _rows(x_KGnH: Tensor, like_TNH: Tensor) -> Tensor:
    return x_KGnH.flatten(0, 1).transpose(0, 1).to(like_TNH.dtype)

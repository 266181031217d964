"""Causal attention over packed documents, block-diagonal by construction.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension,
S = segments + 1 entries of `cu_seqlens`.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgpt.errors import UserError
from sparkgpt.ops.cpu_attention import tiled_attention
from sparkgpt.ops.varlen import HEAD_DIMS, varlen_forward


def varlen_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S: Tensor,
    max_seqlen: int,
    backend: str,
    configs: str = "",
) -> Tensor:
    """Each segment attends causally to itself alone, with scale H ** -0.5.

    q (T, N, H); k, v (T, K, H) with K dividing N; cu_seqlens (S,) int32 from 0 to T without empty
    segments; max_seqlen a host int that bounds every segment. Returns (T, N, H). `backend` is a
    name from `BACKENDS`, as `choose_backend` returns it; `configs` as of `varlen_forward`, for
    "triton" alone.
    """
    chosen = (configs,) if backend == "triton" else ()
    return BACKENDS[backend](q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen, *chosen)


def choose_backend(
    wanted: str, device: torch.device, head_dim: int | None = None, triton: bool = True
) -> str:
    """Resolve 'auto' for a device; UserError when the wanted back end cannot run there.

    On a CPU our tiles. On CUDA the first of: our kernels, where `triton` and `head_dim` (None: any)
    allow; flash-attn; torch's own.
    """
    if device.type == "cpu":
        if wanted in ("triton", "flash-attn", "varlen"):
            raise UserError(
                f"--attention-backend {wanted} needs a CUDA device; use auto, tiles or sdpa "
                "on a CPU"
            )
        return "tiles" if wanted == "auto" else wanted
    if wanted == "tiles":
        raise UserError("--attention-backend tiles is for a CPU; use auto")
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if wanted == "flash-attn" and not has_flash:
        raise UserError(
            "--attention-backend flash-attn: the package flash_attn is not installed; "
            "install it, or use varlen"
        )
    misses = _what_triton_misses(head_dim)
    if wanted == "triton" and misses:
        raise UserError(f"--attention-backend triton: {misses}; use varlen")
    if wanted != "auto":
        return wanted
    if triton and not misses:
        return "triton"
    return "flash-attn" if has_flash else "varlen"


def _what_triton_misses(head_dim: int | None) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if head_dim not in (None, *HEAD_DIMS):
        return f"a head dimension of 64 or 128 is needed, not {head_dim}"
    return ""


def _per_document(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen):
        # split, not slices: its backward is one concatenation, where each slice's backward would
        # fill a gradient of the whole window with zeros.
        lengths = cu_seqlens_S.diff().tolist()
        documents = zip(
            q_TNH.split(lengths), k_TKH.split(lengths), v_TKH.split(lengths), strict=True
        )
        return torch.cat([one(*(x.transpose(0, 1)[None] for x in qkv)) for qkv in documents])

    return attend


def _sdpa(q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor) -> Tensor:
    out_1NTH = F.scaled_dot_product_attention(
        q_1NTH, k_1KTH, v_1KTH, is_causal=True, enable_gqa=True
    )
    return out_1NTH[0].transpose(0, 1)


def _sdpa_expanded(q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor) -> Tensor:
    # Query head n reads key/value head n // (N / K), as enable_gqa does; on two CPU cores the
    # explicit copy is a fifth faster than enable_gqa's own.
    groups = q_1NTH.shape[1] // k_1KTH.shape[1]
    k_1NTH = k_1KTH.repeat_interleave(groups, 1)
    v_1NTH = v_1KTH.repeat_interleave(groups, 1)
    out_1NTH = F.scaled_dot_product_attention(q_1NTH, k_1NTH, v_1NTH, is_causal=True)
    return out_1NTH[0].transpose(0, 1)


def _sdpa_view(q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor) -> Tensor:
    # The same mapping of heads, where one key/value head serves all queries without a copy.
    shape = (1, k_1KTH.shape[1], q_1NTH.shape[1] // k_1KTH.shape[1], *k_1KTH.shape[2:])
    k_1NTH, v_1NTH = (x[:, :, None].expand(shape).flatten(1, 2) for x in (k_1KTH, v_1KTH))
    out_1NTH = F.scaled_dot_product_attention(q_1NTH, k_1NTH, v_1NTH, is_causal=True)
    return out_1NTH[0].transpose(0, 1)


def _flash_attn(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen):
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens_S,
        cu_seqlens_S,
        max_seqlen,
        max_seqlen,
        causal=True,
        deterministic=True,
    )


def _varlen_attn(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens_S,
        cu_seqlens_S,
        max_seqlen,
        max_seqlen,
        window_size=(-1, 0),  # (left, right): all to the left, nothing to the right: causal
        enable_gqa=True,
    )


def _tiles(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen):
    return tiled_attention(q_TNH, k_TKH, v_TKH, cu_seqlens_S)


def _triton(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen, configs):
    return varlen_forward(q_TNH, k_TKH, v_TKH, cu_seqlens_S, configs)[0]


BACKENDS = {
    "tiles": _tiles,
    "sdpa": _per_document(_sdpa),
    "sdpa-expanded": _per_document(_sdpa_expanded),
    "sdpa-view": _per_document(_sdpa_view),
    "triton": _triton,
    "flash-attn": _flash_attn,
    "varlen": _varlen_attn,
}

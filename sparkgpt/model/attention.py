"""Grouped-query attention with per-head q/k RMSNorm and RoPE.

Shapes: T packed positions, D model width, N query heads, K key/value heads, H head dimension,
S = segments + 1.
"""

from torch import Tensor, nn

from sparkgpt.config import ModelConfig
from sparkgpt.model.linear import Linear, RMSNorm
from sparkgpt.ops.attention import varlen_attention
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.qk_rope import qk_rope
from sparkgpt.ops.qk_rope_attention import qk_rope_attention
from sparkgpt.ops.rope import apply_rope


class Attention(nn.Module):
    """Qwen3's attention; q, k and v come from one fused matrix with rows in that order."""

    def __init__(self, config: ModelConfig, kernels: Kernels = Kernels()):  # noqa: B008, frozen
        super().__init__()
        self.kernels = kernels
        self.heads = (config.attention_heads, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_dim
        sizes = {"N": config.attention_heads, "K": config.kv_heads, "H": config.head_dim}
        self.configs = kernels.configs_of("attention", **sizes)
        self.qkv = Linear(config.model_dim, sum(self.heads) * config.head_dim)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.o = Linear(config.attention_heads * config.head_dim, config.model_dim)

    def qkv_heads(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, N + 2K, H): queries, keys, values."""
        return self.qkv(x_TD).view(x_TD.shape[0], sum(self.heads), self.head_dim)

    def project(
        self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normed, rotated queries (T, N, H) and keys (T, K, H), and values (T, K, H)."""
        qkv_TAH = self.qkv_heads(x_TD)
        if self.kernels.qk_rope:
            gains = self.q_norm.weight, self.k_norm.weight
            return qk_rope(qkv_TAH, *gains, cos_TH, sin_TH, self.heads[1], self.q_norm.eps)
        q_TNH, k_TKH, v_TKH = qkv_TAH.split(self.heads, dim=1)
        q_TNH = apply_rope(self.q_norm(q_TNH), cos_TH, sin_TH)
        k_TKH = apply_rope(self.k_norm(k_TKH), cos_TH, sin_TH)
        return q_TNH, k_TKH, v_TKH

    def forward(
        self,
        x_TD: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        cu_seqlens_S: Tensor,
        max_seqlen: int,
        backend: str,
    ) -> Tensor:
        """(T, D) -> (T, D); see `varlen_attention` for the last three."""
        if self.kernels.qk_rope and backend == "triton":
            gains, tables = (self.q_norm.weight, self.k_norm.weight), (cos_TH, sin_TH)
            constants = self.heads[1], self.q_norm.eps, self.configs
            out_TNH = qk_rope_attention(
                self.qkv_heads(x_TD), *gains, *tables, cu_seqlens_S, *constants
            )
        else:
            qkv = self.project(x_TD, cos_TH, sin_TH)
            segments = (cu_seqlens_S, max_seqlen, backend)
            out_TNH = varlen_attention(*qkv, *segments, self.configs)
        return self.o(out_TNH.flatten(1))

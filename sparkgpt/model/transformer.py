"""The decoder: embedding, blocks, final norm, head.

Shapes: T packed positions, D model width, H head dimension, V vocabulary, L sparse layers,
E experts, S = segments + 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparkgpt.config import ModelConfig
from sparkgpt.model.attention import Attention
from sparkgpt.model.linear import Linear, RMSNorm
from sparkgpt.model.mlp import MLP
from sparkgpt.model.moe import LayerStats, MoE
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.rope import rope_tables
from sparkgpt.vocab import FILLER, VOCAB_SIZE


class RouterStats(NamedTuple):
    """`LayerStats` of all sparse layers, stacked: sums over real positions, in float32."""

    counts_LE: Tensor
    prob_sums_LE: Tensor  # the differentiable one
    entropy_sum_L: Tensor  # nats


class Block(nn.Module):
    """Pre-norm attention and MLP (or experts), each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.input_layernorm = RMSNorm(config.model_dim, config.rms_norm_eps)
        self.attention = Attention(config, kernels)
        self.post_attention_layernorm = RMSNorm(config.model_dim, config.rms_norm_eps)
        self.sparse = config.is_sparse(layer)
        if self.sparse:
            self.moe = MoE(config, kernels)
        else:
            self.mlp = MLP(config, kernels)

    def feed_forward(self, x_TD: Tensor, real_T: Tensor | None) -> tuple[Tensor, LayerStats | None]:
        """The second half without its residual: (T, D) -> (T, D), and the router's statistics."""
        normed_TD = self.post_attention_layernorm(x_TD)
        if self.sparse:
            return self.moe(normed_TD, real_T)
        return self.mlp(normed_TD), None

    def forward(self, x_TD: Tensor, rope: tuple, segments: tuple, real_T: Tensor | None):
        """rope = (cos, sin) each (T, H); segments = (cu_seqlens, max_seqlen, backend)."""
        x_TD = x_TD + self.attention(self.input_layernorm(x_TD), *rope, *segments)
        out_TD, stats = self.feed_forward(x_TD, real_T)
        return x_TD + out_TD, stats


class Transformer(nn.Module):
    """Qwen3ForCausalLM / Qwen3MoeForCausalLM over 259 ids, on packed windows.

    `compute_dtype` is the dtype of the residual stream and all matmuls (weights stay float32);
    `attention_backend` a name that `ops.attention.choose_backend` returned, `kernels` the fused
    operations. Weights are uninitialised until `mup.init_weights` or `load_state_dict`.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: torch.dtype = torch.float32,
        attention_backend: str = "sdpa-expanded",
        kernels: Kernels = Kernels(),  # noqa: B008, frozen
    ):
        super().__init__()
        self.kernels = kernels
        self.config = config
        self.compute_dtype = compute_dtype
        self.attention_backend = attention_backend
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, config.model_dim)
        self.layers = nn.ModuleList(Block(config, i, kernels) for i in range(config.model_layers))
        self.norm = RMSNorm(config.model_dim, config.rms_norm_eps)
        self.lm_head = Linear(config.model_dim, VOCAB_SIZE)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens_S: Tensor,
        real_T: Tensor | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """Final normed states (T, D) in the compute dtype, and what the routers did.

        tokens, positions (T,) int64; cu_seqlens (S,) int32 (see `varlen_attention`); real (T,) bool
        marks the positions that count in the statistics.
        """
        config = self.config
        # A constant, so that a compiled graph serves every window; filler has segments of its own.
        limit = max(config.max_position_embeddings, FILLER)
        rope = rope_tables(positions_T, config.head_dim, config.rope_theta, self.compute_dtype)
        segments = (cu_seqlens_S, limit, self.attention_backend)
        x_TD = self.embed_tokens(tokens_T).to(self.compute_dtype)
        stats: list[LayerStats] = []
        for block in self.layers:
            x_TD, layer_stats = block(x_TD, rope, segments, real_T)
            if layer_stats is not None:
                stats.append(layer_stats)
        router = RouterStats(*map(torch.stack, zip(*stats, strict=True))) if stats else None
        return self.norm(x_TD), router

    def logits(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> float32 (T, V)."""
        return self.lm_head(x_TD).float()

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens_S: Tensor,
        real_T: Tensor | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """Float32 logits (T, V) and the routers' statistics; arguments as in `hidden`."""
        x_TD, router = self.hidden(tokens_T, positions_T, cu_seqlens_S, real_T)
        return self.logits(x_TD), router

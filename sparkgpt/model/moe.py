"""The sparse MLP: a softmax top-k router over packed SwiGLU experts.

Shapes: T packed positions, D model width, E experts, k experts per position, F expert hidden width,
G = 2F, R = T * k rows sorted by expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparkgpt.config import ModelConfig
from sparkgpt.model.linear import Linear
from sparkgpt.model.mlp import swiglu
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.dispatch import fused_combine, fused_dispatch
from sparkgpt.ops.experts import combine, dispatch, grouped_linear, sort_by_expert
from sparkgpt.ops.swiglu import swiglu_mlp


class LayerStats(NamedTuple):
    """What one router did over the real positions: sums, so that windows and ranks just add."""

    counts_E: Tensor  # float32, selections of each expert
    prob_sums_E: Tensor  # float32, sum of router probabilities (differentiable)
    entropy_sum: Tensor  # float32 scalar, nats, detached


class MoE(nn.Module):
    """Qwen3-MoE's block: softmax over all experts in float32, top-k, optional renormalisation."""

    def __init__(self, config: ModelConfig, kernels: Kernels = Kernels()):  # noqa: B008, frozen
        super().__init__()
        self.kernels = kernels
        self.k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        shape = (config.num_experts, config.moe_intermediate_size, config.model_dim)
        num_experts, hidden, width = shape
        self.configs = kernels.configs_of("swiglu", D=width, E=num_experts, F=hidden)
        self.router = Linear(width, num_experts)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities (T, E) float32, weights (T, k) in x's dtype, experts (T, k) int64."""
        probs_TE = torch.softmax(self.router(x_TD).float(), dim=-1)
        weight_Tk, expert_Tk = probs_TE.topk(self.k, dim=-1)
        if self.norm_topk_prob:
            weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
        return probs_TE, weight_Tk.to(x_TD.dtype), expert_Tk

    def experts(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Each row through its expert: (R, D) sorted by expert -> (R, D)."""
        gate_up_EGD, down_EDF = self.gate_up.to(rows_RD.dtype), self.down.to(rows_RD.dtype)
        if self.kernels.swiglu:
            return swiglu_mlp(rows_RD, gate_up_EGD, down_EDF, offsets_E, self.configs)
        hidden_RF = swiglu(grouped_linear(rows_RD, gate_up_EGD, offsets_E))
        return grouped_linear(hidden_RF, down_EDF, offsets_E)

    def forward(self, x_TD: Tensor, real_T: Tensor | None) -> tuple[Tensor, LayerStats]:
        """(T, D) -> (T, D) and the statistics over positions where real (T,) bool (None: all)."""
        probs_TE, weight_Tk, expert_Tk = self.route(x_TD)
        num_experts = probs_TE.shape[1]
        order_R, inverse_R, offsets_E = sort_by_expert(expert_Tk, num_experts)
        if self.kernels.dispatch:
            rows_RD = fused_dispatch(x_TD, inverse_R, self.k)
            out_TD = fused_combine(self.experts(rows_RD, offsets_E), weight_Tk, inverse_R)
        else:
            rows_RD = dispatch(x_TD, order_R, inverse_R, self.k)
            out_TD = combine(self.experts(rows_RD, offsets_E), weight_Tk, order_R, inverse_R)
        return out_TD, layer_stats(probs_TE, expert_Tk, real_T)


def layer_stats(probs_TE: Tensor, expert_Tk: Tensor, real_T: Tensor | None) -> LayerStats:
    """Sums over the real positions of one router's choices, probabilities and entropy."""
    experts_E = torch.arange(probs_TE.shape[1], device=probs_TE.device)
    chosen_TE = (expert_Tk[..., None] == experts_E).sum(1).float()
    with torch.no_grad():
        entropy_T = torch.special.entr(probs_TE).sum(-1)
    if real_T is not None:
        mask_T = real_T.float()
        chosen_TE, probs_TE = chosen_TE * mask_T[:, None], probs_TE * mask_T[:, None]
        entropy_T = entropy_T * mask_T
    return LayerStats(chosen_TE.sum(0), probs_TE.sum(0), entropy_T.sum())

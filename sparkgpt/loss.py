"""The training losses: next-byte cross-entropy and the routers' load balance.

Shapes: T packed positions, V vocabulary, L sparse layers, E experts.
"""

import torch.nn.functional as F
from torch import Tensor

from sparkgpt.model.transformer import RouterStats
from sparkgpt.vocab import IGNORE_INDEX


def cross_entropy_sum(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Sum of nats over the real targets, float64 scalar; targets (T,) int64, -100 is ignored.

    A sum, because the denominator is the *global* batch's count: packing, accumulation and ranks
    then agree, and a window of filler alone gives 0, not 0/0. Each target's nats are float32;
    added in float32, a window of them would be off by 1e-6.
    """
    nats_T = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE_INDEX, reduction="none")
    return nats_T.double().sum()


def load_balance(prob_sums_LE: Tensor, counts_LE: Tensor, positions: int) -> Tensor:
    """E * sum_e (c_e / n) * (p_e / n), pooled over layers: top_k when balanced.

    `counts` and `positions` belong to the global batch, n = positions * L rows; `prob_sums` may be
    a local part: the value is linear in it, so the parts' values and gradients add up to the whole.
    Equals transformers' `load_balancing_loss_func`. Source: Fedus et al. 2021 (arXiv:2101.03961).
    """
    layers, num_experts = counts_LE.shape
    rows = max(positions, 1) * layers
    return num_experts * ((counts_LE.sum(0) / rows) * (prob_sums_LE.sum(0) / rows)).sum()


def router_summary(stats: RouterStats, positions: int) -> dict[str, object]:
    """Logged figures of a batch: shares of selections (min, max, CV, per layer), entropy, unused.

    Shares are relative to a balanced load of 1. `positions` is the batch's real positions.
    """
    load_LE = stats.counts_LE / stats.counts_LE.sum(1, keepdim=True).clamp(min=1)
    load_LE = load_LE * stats.counts_LE.shape[1]
    entropy = stats.entropy_sum_L.sum() / (max(positions, 1) * stats.counts_LE.shape[0])
    return {
        "router/min": load_LE.min().item(),
        "router/max": load_LE.max().item(),
        "router/cv": load_LE.std(1, correction=0).mean().item(),
        "router/entropy": entropy.item(),
        "router/unused": int((stats.counts_LE == 0).sum().item()),
        "router/load": [[round(value, 4) for value in row] for row in load_LE.tolist()],
    }

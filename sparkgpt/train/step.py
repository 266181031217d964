"""One training step: R windows on each rank, one global batch, one update.

Shapes: L sparse layers, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgpt.config import TrainConfig
from sparkgpt.data.stream import Window
from sparkgpt.distributed import Ranks, sum_gradients, sum_over_ranks
from sparkgpt.guard import largest_gradient, why_bad
from sparkgpt.loss import cross_entropy_sum, load_balance
from sparkgpt.model.transformer import RouterStats, Transformer
from sparkgpt.ops.cross_entropy import head_nats_sum
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.vocab import IGNORE_INDEX


@dataclass(frozen=True)
class StepResult:
    """What a step over the global batch came to; equal on every rank."""

    loss: float  # nats per real target
    bad: str | None  # why the step changed nothing, if it didn't
    stops: int  # how many ranks want to stop after it
    aux_loss: Tensor | None  # on the device still, as the routers' statistics are
    router: RouterStats | None


def window_loss(model: Transformer, window: Window) -> tuple[Tensor, RouterStats | None]:
    """Sum of nats over a window's real targets, and the routers' statistics."""
    real_T = window.targets_T != IGNORE_INDEX
    x_TD, router = model.hidden(window.tokens_T, window.positions_T, window.cu_seqlens_S, real_T)
    if model.kernels.head:
        return head_nats_sum(x_TD, model.lm_head.weight, window.targets_T), router
    return cross_entropy_sum(model.logits(x_TD), window.targets_T), router


def train_step(
    model: Transformer,
    loss_of,
    optimizer: HybridOptimizer,
    windows: list[Window],
    real_total: int,
    factor: float,
    train: TrainConfig,
    ranks: Ranks,
    stop: bool,
) -> StepResult:
    """Forward and backward over this rank's windows, then one update of every rank alike, or none
    when the loss or a gradient is not finite.

    `loss_of` is `window_loss`, compiled, or in parts; `real_total` the real targets of the global
    batch, known to every rank from the plan; `factor` the schedule's share of the peak rates.
    Reads three numbers from the device before the update, in one transfer.
    """
    sums, routers = [], []
    for window in windows:
        nats, router = loss_of(model, window)
        if router is None:  # nothing global is needed: free this window's graph at once
            (nats / max(real_total, 1)).backward()
        else:
            routers.append(router)
        sums.append(nats if router is not None else nats.detach())
    nats, stops, router = _global_sums(sums, routers, ranks, stop)
    aux = None
    if router is not None:
        local_LE = torch.stack([r.prob_sums_LE for r in routers]).sum(0)
        local_aux = load_balance(local_LE, router.counts_LE, real_total)
        loss = torch.stack(sums).sum() / max(real_total, 1)
        (loss + train.router_aux_loss_coef * local_aux).backward()
        aux = load_balance(router.prob_sums_LE, router.counts_LE, real_total)
    sum_gradients(model.parameters(), ranks)
    figures = (nats / max(real_total, 1), stops, largest_gradient(model.parameters()).double())
    loss, stops, gradient = torch.stack(figures).tolist()
    bad = why_bad(loss, gradient, model)
    if bad is None:
        optimizer.step(factor)
    optimizer.zero_grad()
    return StepResult(loss, bad, int(stops), aux, router)


def _global_sums(
    sums: list[Tensor], routers: list[RouterStats], ranks: Ranks, stop: bool
) -> tuple[Tensor, Tensor, RouterStats | None]:
    """One packed all-reduce: nats, how many ranks want to stop, and what the routers counted."""
    nats = torch.stack(sums).sum().detach().double()
    pieces = [torch.stack((nats, nats.new_full((), float(stop))))]
    stacked = [torch.stack(field).sum(0).detach() for field in zip(*routers, strict=True)]
    pieces += [field.flatten().double() for field in stacked]
    packed = sum_over_ranks(torch.cat(pieces), ranks)
    if not routers:
        return packed[0], packed[1], None
    fields = packed[2:].float().split([field.numel() for field in stacked])
    router = RouterStats(*(f.view_as(s) for f, s in zip(fields, stacked, strict=True)))
    return packed[0], packed[1], router

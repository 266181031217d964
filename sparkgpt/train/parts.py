"""On a CPU, a window's documents dealt out to threads, with a forward and a backward in each.

Threads that share every operation wait for each other some thousand times in a step, and Python
keeps one of them busy between operations. Parts wait for each other twice.
Shapes: T positions of a window or a part, S segments + 1, L sparse layers, E experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparkgpt.config import ModelConfig
from sparkgpt.data.stream import Window
from sparkgpt.model.cost import step_flops
from sparkgpt.model.transformer import RouterStats, Transformer
from sparkgpt.ops.workers import side_by_side
from sparkgpt.train.step import window_loss

UNEVEN = 1.25  # the costliest part against the mean, at most: beyond, all threads take one window
MOST_PARTS = 8  # each has gradients of all weights for itself, until they are added up


def loss_in_parts(model: Transformer, window: Window) -> tuple[Tensor, RouterStats | None]:
    """`window_loss`, computed on torch's threads part by part: the same sums in another order.

    nats () float64, and `RouterStats` of the whole window. Without gradients it stays whole.
    """
    threads = torch.get_num_threads() if torch.is_grad_enabled() else 1
    parts = deal(window, model.config, threads) if threads > 1 else [window]
    if len(parts) == 1:
        return window_loss(model, window)
    nats, *router = _Parts.apply(model, parts, *model.parameters())
    return nats, RouterStats(*router) if router else None


def deal(window: Window, config: ModelConfig, threads: int) -> list[Window]:
    """The segments of a window in as many parts as `threads` divide into evenly, at most eight,
    each about as costly; [window] itself when its documents don't allow for more than one.

    Always the same parts of the same window. Longest first, each to the part with the least work
    (Graham 1969, doi:10.1137/0117039); then what evens out the most and the least of them moves or
    changes places.
    """
    lengths = window.cu_seqlens_S.diff().tolist()
    costs = [step_flops(config, [length]) for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for count in (n for n in range(min(threads, MOST_PARTS), 1, -1) if threads % n == 0):
        shares: list[list[int]] = [[] for _ in range(count)]
        loads = [0.0] * count
        for segment in longest_first:
            least = loads.index(min(loads))
            shares[least].append(segment)
            loads[least] += costs[segment]
        while _even_out(shares, loads, costs):
            pass
        if max(loads) * count <= UNEVEN * sum(loads):
            return [_taken(window, lengths, sorted(share)) for share in shares]
    return [window]


def _even_out(shares: list[list[int]], loads: list[float], costs: list[float]) -> bool:
    """Move a segment from the part with the most work to that with the least, or change it for one
    of that, so that their gap shrinks most; False when none of it shrinks."""
    high, low = loads.index(max(loads)), loads.index(min(loads))
    gap = loads[high] - loads[low]
    less = lambda i, j: costs[i] - (0.0 if j is None else costs[j])
    pairs = [(i, j) for i in shares[high] for j in [None, *shares[low]]]
    i, j = min(pairs, key=lambda pair: abs(gap - 2 * less(*pair)))
    if abs(gap - 2 * less(i, j)) >= 0.99 * gap:  # the case of no gap is among these
        return False
    shares[high].remove(i)
    shares[low].append(i)
    if j is not None:
        shares[low].remove(j)
        shares[high].append(j)
    loads[high] -= less(i, j)
    loads[low] += less(i, j)
    return True


def _taken(window: Window, lengths: list[int], segments: list[int]) -> Window:
    """A window of some of the segments."""

    def taken(x_T: Tensor) -> Tensor:
        pieces = x_T.split(lengths)
        return torch.cat([pieces[i] for i in segments])

    ends = torch.tensor([0] + [lengths[i] for i in segments]).cumsum(0)
    documents = [i for i in segments if i < len(window.doc_ids)]  # filler's segments are the last
    own = [window.doc_lengths[i] for i in documents]
    return Window(
        taken(window.tokens_T),
        taken(window.targets_T),
        taken(window.positions_T),
        ends.to(window.cu_seqlens_S.dtype),
        own,
        [window.doc_ids[i] for i in documents],
        sum(own),
    )


class _Parts(torch.autograd.Function):
    """Nats and the routers' statistics, added up over parts in their order; the gradients too."""

    @staticmethod
    def forward(ctx, model: Transformer, parts: list[Window], *parameters: Tensor):
        with torch.enable_grad():
            ctx.found = side_by_side([partial(window_loss, model, part) for part in parts])
        ctx.parameters = parameters
        nats = torch.stack([nats.detach() for nats, _ in ctx.found]).sum()
        routers = [router for _, router in ctx.found if router is not None]
        fields = [torch.stack(field).detach().sum(0) for field in zip(*routers, strict=True)]
        if fields:
            router = RouterStats(*fields)
            ctx.mark_non_differentiable(router.counts_LE, router.entropy_sum_L)
        return nats, *fields

    @staticmethod
    def backward(ctx, dnats: Tensor, *dfields: Tensor) -> tuple[Any, ...]:
        dprob_sums_LE = RouterStats(*dfields).prob_sums_LE if dfields else None

        def gradients(nats: Tensor, router: RouterStats | None) -> tuple[Tensor, ...]:
            if router is None:
                return torch.autograd.grad(nats, ctx.parameters, dnats)
            outputs = (nats, router.prob_sums_LE)
            return torch.autograd.grad(outputs, ctx.parameters, (dnats, dprob_sums_LE))

        found = side_by_side([partial(gradients, *one) for one in ctx.found])
        del ctx.found
        return None, None, *(sum(others, first) for first, *others in zip(*found, strict=True))

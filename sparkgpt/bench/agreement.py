"""Whether our step computes what it is compared with: loss and gradients against transformers'.

Equal weights, all of them random (a fresh head is zero and hides everything beneath it), one
packed window; transformers takes its documents one at a time, which no mask can spoil.

Shapes: V vocabulary, n positions of one document.
"""

import math

import torch
import torch.nn.functional as F

from sparkgpt.bench.peer import build_peer, peer_logits, stock_tensors
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.data.stream import Window
from sparkgpt.distributed import Ranks
from sparkgpt.model import Transformer
from sparkgpt.train.build import build_loss, build_model
from sparkgpt.vocab import IGNORE_INDEX

CPU = Ranks(0, 1, torch.device("cpu"))
# Relative, in float32: sums over a window of 8,192 in other orders differ by less than 1e-6.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4  # of each tensor: norm of the difference over norm


def agreement(config: ModelConfig, train: TrainConfig, window: Window) -> dict:
    """Compare one window, ours built as the step builds it.

    `passed`, and by how much they differ, relative (None: not finite), beside the tolerances.

    `loss` and `gradient` (the worst tensor, named) are ours against transformers, document by
    document; `masked_loss` is transformers on the packed window against itself on its documents.
    """
    ours, _ = build_model(config, train, CPU)
    randomise(ours, train.seed)
    theirs = build_peer(config)
    theirs.load_state_dict(stock_tensors(ours.state_dict(), config))
    nats, _ = build_loss(train, CPU)(ours, window)
    loss = nats / window.real_tokens
    loss.backward()
    expected = _their_loss(theirs, window)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    differences = gradient_differences(
        stock_tensors(gradients, config), {name: p.grad for name, p in theirs.named_parameters()}
    )
    worst = worst_of(differences)
    found = {
        "loss": abs(loss.item() - expected) / expected,
        "gradient": differences[worst],
        "masked_loss": abs(_masked_loss(theirs, window) - expected) / expected,
    }
    limits = {
        "loss": LOSS_TOLERANCE,
        "gradient": GRADIENT_TOLERANCE,
        "masked_loss": LOSS_TOLERANCE,
    }
    return {
        # A NaN is above no limit, hence "at most" asked of each.
        "passed": all(found[name] <= limit for name, limit in limits.items()),
        "differences": {name: v if math.isfinite(v) else None for name, v in found.items()},
        "tolerances": limits,
        "worst_tensor": worst,
        "documents": len(window.doc_lengths),
        "nats": expected,
    }


@torch.no_grad()
def randomise(model: Transformer, seed: int) -> None:
    """Every weight random: matrices of unit gain, gains spread around one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_(1 + 0.3 * noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def gradient_differences(ours: dict, theirs: dict) -> dict[str, float]:
    """Name -> norm of the difference over the norm of theirs. The names must be the same."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {
        name: ((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30)).item()
        for name in ours
    }


def worst_of(differences: dict[str, float]) -> str:
    """The name of the largest; a NaN, which compares with nothing, is larger than any."""
    return max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))


def _their_loss(model, window: Window) -> float:
    """Nats per real target from the documents one at a time; leaves the gradients of it."""
    total, start = 0.0, 0
    for positions in window.doc_lengths:
        part = slice(start, start + positions)
        logits_nV = peer_logits(model, window.tokens_T[None, part], None)[0]
        nats = F.cross_entropy(logits_nV, window.targets_T[part], reduction="none").double().sum()
        (nats / window.real_tokens).backward()
        total += nats.item()
        start += positions
    return total / window.real_tokens


@torch.no_grad()
def _masked_loss(model, window: Window) -> float:
    logits_TV = peer_logits(model, window.tokens_T[None], window.positions_T[None])[0]
    nats_T = F.cross_entropy(
        logits_TV, window.targets_T, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return nats_T.double().sum().item() / window.real_tokens

"""Coordinate check: under muP, activations after a few steps don't grow or shrink with width.

Yang et al. 2022 (arXiv:2203.03466), appendix D.1.
"""

import math

import torch
from helpers.models import pack, small

from sparkgpt.config import TrainConfig
from sparkgpt.loss import cross_entropy_sum
from sparkgpt.model import Transformer, mup
from sparkgpt.model.mup import init_weights
from sparkgpt.optim import groups
from sparkgpt.optim.hybrid import HybridOptimizer

WIDTHS = (64, 128, 256, 512)
STEPS = 10


def activation_sizes(width: int, seed: int) -> dict[str, float]:
    """Mean absolute activation of blocks and logits after STEPS steps on one fixed batch."""
    heads = width // 32
    config = small(
        model_layers=2, model_dim=width, head_dim=32, attention_heads=heads, kv_heads=heads // 2,
        intermediate_size=3 * width,
    )  # fmt: skip
    train = TrainConfig(seed=seed, mup_base_dim=64, adamw_lr=2e-3, muon_lr=1e-2)
    model = Transformer(config)
    init_weights(model, train)
    optimizer = HybridOptimizer(model, train)
    generator = torch.Generator().manual_seed(seed)
    documents = [bytes(torch.randint(97, 123, (60,), generator=generator).tolist()) for _ in "1234"]
    tokens_T, targets_T, positions_T, cu_seqlens_S = pack(documents)
    for _ in range(STEPS):
        logits_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
        (cross_entropy_sum(logits_TV, targets_T) / len(targets_T)).backward()
        optimizer.step(1.0)
    sizes = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: sizes.__setitem__(name, out.abs().mean().item())
        )
        for name, module in model.named_modules()
        if name.endswith(("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down", "lm_head"))
    ]
    with torch.no_grad():
        model(tokens_T, positions_T, cu_seqlens_S)
    for hook in hooks:
        hook.remove()
    return sizes


def slopes() -> dict[str, float]:
    """Least-squares slope of log activation against log width, for each module."""
    rows = [
        {name: sum(activation_sizes(w, s)[name] for s in (0, 1)) for name in activation_sizes(w, 0)}
        for w in WIDTHS
    ]
    xs = [math.log(w) for w in WIDTHS]
    mean_x = sum(xs) / len(xs)
    found = {}
    for name in rows[0]:
        ys = [math.log(row[name]) for row in rows]
        mean_y = sum(ys) / len(ys)
        top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        found[name] = top / sum((x - mean_x) ** 2 for x in xs)
    return found


def test_activations_do_not_depend_on_width():
    found = slopes()
    assert max(abs(slope) for slope in found.values()) < 0.1, found


def test_without_mup_they_do(monkeypatch):
    monkeypatch.setattr(mup, "width_ratio", lambda width, base: 1.0)
    monkeypatch.setattr(groups, "width_ratio", lambda width, base: 1.0)
    found = slopes()
    assert max(abs(slope) for slope in found.values()) > 0.1, found

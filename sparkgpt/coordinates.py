"""`sparkgpt coordinates`: the coordinate check of muP, as a record.

Trains one small model per width for a few steps on one batch and records how large activations
are. Under muP they don't depend on width: the slope of log size against log width is near zero.
Source: Yang et al. 2022 (arXiv:2203.03466), appendix D.1.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.files import write_json
from sparkgpt.flags import Parser
from sparkgpt.progress import progress
from sparkgpt.vocab import BOS, EOS

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
WIDTHS = (64, 128, 256, 512)
STEPS = 5
SEEDS = (0, 1)
BASE_DIM = 64
RATES = {"adamw_lr": 2e-3, "muon_lr": 1e-2}
# Ends of the names of the modules whose outputs are measured.
MEASURED = ("attention.qkv", "attention.o", "gate_up", "down", "moe", "moe.router", "lm_head")


def shape(width: int, num_experts: int) -> ModelConfig:
    """Two layers of the family head_dim 32, kv = heads / 2, intermediate = 3 x width."""
    return ModelConfig(
        model_layers=2,
        model_dim=width,
        attention_heads=width // 32,
        kv_heads=width // 64,
        head_dim=32,
        intermediate_size=3 * width,
        num_experts=num_experts,
        moe_intermediate_size=3 * width // 2,
        max_position_embeddings=256,
    )


def activation_sizes(config: ModelConfig, train: TrainConfig, steps: int) -> dict[str, float]:
    """Module name -> mean absolute output after `steps` updates on one seeded batch."""
    import torch

    from sparkgpt.loss import cross_entropy_sum
    from sparkgpt.model import Transformer
    from sparkgpt.model.mup import init_weights
    from sparkgpt.optim.hybrid import HybridOptimizer

    model = Transformer(config)
    init_weights(model, train)
    optimizer = HybridOptimizer(model, train)
    tokens_T, targets_T, positions_T, cu_seqlens_S = _batch(train.seed)
    for _ in range(steps):
        logits_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
        (cross_entropy_sum(logits_TV, targets_T) / len(targets_T)).backward()
        optimizer.step(1.0)
    sizes: dict[str, float] = {}

    def keep(name: str):
        def hook(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            sizes[name] = output.abs().mean().item()

        return hook

    for name, module in model.named_modules():
        if name.endswith(MEASURED):
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        model(tokens_T, positions_T, cu_seqlens_S)
    return sizes


def coordinate_check(num_experts: int, widths=WIDTHS, steps: int = STEPS, seeds=SEEDS) -> dict:
    """Sizes per module and width (mean over seeds) and the log-log slope of each module."""
    train = TrainConfig(mup_base_dim=BASE_DIM, **RATES)
    rows = []
    with progress("coordinate check, widths", len(widths)) as bar:
        for width in widths:
            config = shape(width, num_experts)
            runs = [activation_sizes(config, replace(train, seed=s), steps) for s in seeds]
            rows.append({name: sum(run[name] for run in runs) / len(runs) for name in runs[0]})
            bar.advance()
    sizes = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        "num_experts": num_experts,
        "widths": list(widths),
        "steps": steps,
        "seeds": list(seeds),
        "sizes": sizes,
        "slopes": {name: slope(widths, values) for name, values in sizes.items()},
    }


def slope(widths, sizes: list[float]) -> float:
    """Least-squares slope of log size against log width."""
    xs, ys = [math.log(w) for w in widths], [math.log(s) for s in sizes]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mean_x) ** 2 for x in xs)


def main(argv: list[str]) -> None:
    """Run the check on the dense and the MoE shape and write the record."""
    parser = Parser(prog="sparkgpt coordinates", description="muP's coordinate check, as a record.")
    parser.add_argument("--experts", type=int, default=4, help="experts of the MoE shape")
    parser.add_argument("--steps", type=int, default=STEPS, help="updates before measuring")
    parser.add_argument("--out", required=True, metavar="FILE", help="the record")
    args = parser.parse_args(argv)
    checks = {
        "dense": coordinate_check(0, steps=args.steps),
        "moe": coordinate_check(args.experts, steps=args.steps),
    }
    write_json(Path(args.out), {"schema": SCHEMA, **checks})
    print(json.dumps({kind: check["slopes"] for kind, check in checks.items()}))


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four documents of 60 random letters: tokens, targets, positions (T,), cu_seqlens (5,)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (4, 60), generator=generator)
    first, last = torch.full((4, 1), BOS), torch.full((4, 1), EOS)
    tokens_T = torch.cat((first, letters), 1).flatten()
    targets_T = torch.cat((letters, last), 1).flatten()
    positions_T = torch.arange(61).repeat(4)
    return tokens_T, targets_T, positions_T, torch.arange(0, 245, 61, dtype=torch.int32)

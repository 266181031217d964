"""Parameter counts to the unit, and FLOPs against a count by hand."""

from helpers.models import small

from sparkgpt.config import ModelConfig
from sparkgpt.model import Transformer
from sparkgpt.model.cost import (
    ITERATIONS,
    newton_schulz_flops,
    parameter_counts,
    step_flops,
)
from sparkgpt.optim import muon

SHAPE_06B = {
    "model_layers": 28,
    "model_dim": 1024,
    "attention_heads": 16,
    "kv_heads": 8,
    "intermediate_size": 3072,
}


def test_published_counts_to_the_unit():
    assert parameter_counts(ModelConfig())["total"] == 50_617_856
    assert parameter_counts(ModelConfig(**SHAPE_06B))["total"] == 440_997_888
    moe = parameter_counts(ModelConfig(num_experts=8))
    assert (moe["total"], moe["active"]) == (163_929_600, 50_683_392)


def test_formula_counts_what_the_model_holds(variant):
    counts = parameter_counts(variant)
    model = Transformer(variant)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1)
    unused = counts["total"] - counts["active"]
    assert counts["matmul_active"] == matrices - unused - model.embed_tokens.weight.numel()


def test_flops_by_hand():
    config = small(model_layers=1)
    # 2 multiply-adds forward, 4 backward per weight and position; attention: two products of
    # length x length / 2 per head, each 2 FLOPs, three times (forward, and two in the backward).
    linear = 6 * parameter_counts(config)["matmul_active"] * (10 + 4)
    attention = 3 * 2 * 2 * (10 * 10 / 2 + 4 * 4 / 2) * config.attention_heads * config.head_dim
    assert step_flops(config, [10, 4]) == linear + attention


def test_newton_schulz_by_hand():
    one = small(model_layers=1)  # qkv 128 x 48, o 48 x 64, gate_up 192 x 48, down 48 x 96
    flops = sum(5 * (4 * 48 * 48 * n + 2 * 48**3) for n in (128, 64, 192, 96))
    assert newton_schulz_flops(one) == flops and ITERATIONS == muon.ITERATIONS

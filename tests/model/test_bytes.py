"""Bytes of a step: against a published count, against one by hand, and each fusion's share."""

import pytest
from helpers.models import small

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.model.bytes import (
    ATTENTION_HALF,
    DENSE_HALF,
    ENDS,
    EXPERT_HALF,
    FUSIONS,
    LEAST,
    NOTHING,
    OURS,
    muon_bytes,
    newton_schulz_bytes,
    position_bytes,
    step_bytes,
    weight_bytes,
)

TRAIN = TrainConfig()


def test_floor_is_the_published_count_for_50m():
    """Published for 49,152 positions: 69.7 GB of activations, each tensor once per kernel with
    norms, SwiGLU and RoPE fused, 1.7 GB of weights, gradients and moments, 2.2 GB of
    Newton-Schulz, 334 ms at 220 GB/s."""
    least = step_bytes(ModelConfig(), TRAIN, 2)
    assert least["activations"] == pytest.approx(69.7e9, rel=0.03)
    assert least["weights"] == pytest.approx(1.7e9, rel=0.03)
    assert newton_schulz_bytes(ModelConfig(), 2) == pytest.approx(2.2e9, rel=0.01)
    assert sum(least.values()) / 220e9 == pytest.approx(0.334, rel=0.03)


def test_dense_layer_by_hand():
    """The MLP's half at D = 1, F = 1, as each kernel's inputs and outputs."""
    one = {"D": 1, "F": 1}
    cost = lambda fused: sum(
        sum(times * one[name] for name, times in p.moves.items())
        for p in DENSE_HALF
        if p.runs(frozenset(fused))
    )
    # norm 4; gate_up 1 + 2; SwiGLU 2 + 1; down 1 + 1; its gradients 2 x 2; SwiGLU's 3 + 2;
    # gate_up's gradients 2 x (1 + 2); norm 4.
    assert cost(()) == 4 + 3 + 3 + 2 + 4 + 5 + 6 + 4
    # gate_up reads 1 and writes 3; each gradient of it reads gate_up 2 and hidden's gradient 1.
    assert cost(("swiglu",)) == 4 + (1 + 3) + 2 + 4 + 2 * (1 + 2 + 1) + 4
    assert cost(("swiglu", "residual")) == cost(("swiglu",)) - 1


def test_muon_by_hand():
    one = small(model_layers=1)
    squares, elements = 4 * 48 * 48, 48 * (128 + 64 + 192 + 96)
    assert newton_schulz_bytes(one, 4) == 5 * 4 * (3 * elements + 4 * squares)
    assert muon_bytes(one, 4) == newton_schulz_bytes(one, 4) + 8 * elements
    assert muon_bytes(one, 2, NOTHING) == 10 * (4 * elements + 5 * squares) + 42 * elements
    assert step_bytes(one, TrainConfig(optimizer="adamw"), 4)["muon"] == 0
    more = weight_bytes(one, TrainConfig(optimizer="adamw"), 4) - weight_bytes(one, TRAIN, 4)
    assert more == 8 * elements


@pytest.mark.parametrize("experts", [0, 8])
def test_no_fusion_moves_more(experts):
    model = ModelConfig(num_experts=experts)
    total = lambda fused: sum(step_bytes(model, TRAIN, 2, frozenset(fused)).values())
    assert total(LEAST) < total(OURS) < total(NOTHING)
    for fusion in FUSIONS:
        base = {"qk_rope"} if fusion == "attention" else set()
        helps = total({*base, fusion}) < total(base)
        assert helps or (fusion == "dispatch" and not experts), fusion


def test_tables_name_only_what_exists():
    for table in (ATTENTION_HALF, DENSE_HALF, EXPERT_HALF, ENDS):
        for one in table:
            assert one.needs | one.lacks <= LEAST and set(one.moves) <= set("DQKHFRVE"), one.name
            assert all(times > 0 for times in one.moves.values())


def test_experts_by_hand():
    dense = ModelConfig(model_layers=1, intermediate_size=768)
    sparse = ModelConfig(model_layers=1, num_experts=4, num_experts_per_tok=2)
    # Each position has two hidden rows instead of one, and two of its width between the gathers.
    assert position_bytes(sparse, 2) - position_bytes(dense, 2) == 2 * (
        12 * 2 * 768 + 11 * 2 * 512 + 14 * 512 + 8 * 4 - (12 * 768 + 13 * 512)
    )

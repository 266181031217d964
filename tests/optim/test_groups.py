"""muP: roles, rates, initial scales, the schedule, and the whole optimizer's state."""

import math

import pytest
import torch
from helpers.models import DOCUMENTS, VARIANTS, pack, randomised, small

from sparkgpt.config import TrainConfig
from sparkgpt.loss import cross_entropy_sum
from sparkgpt.model import Transformer
from sparkgpt.model.mup import init_weights, role_of
from sparkgpt.optim.groups import parameter_groups
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.optim.schedule import lr_factor


def test_every_parameter_is_in_exactly_one_group(variant):
    model = Transformer(variant)
    names = [n for group in parameter_groups(model, TrainConfig()) for n in group.names]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def test_rates_and_decay_of_each_role():
    model = Transformer(small(model_dim=64, num_experts=4))
    train = TrainConfig(mup_base_dim=256, router_lr=7e-4)
    groups = {g.role: (g.optimizer, g.lr, g.weight_decay) for g in parameter_groups(model, train)}
    assert groups == {
        "embedding": ("adamw", 5e-4, 0.01),
        "gain": ("adamw", 5e-4, 0.01),
        "head": ("adamw", 5e-4 * 4, 0.01),
        "router": ("adamw", 7e-4, 0.0),
        "hidden": ("muon", 4e-3, 0.0),
        "residual": ("muon", 4e-3, 0.0),
    }


def test_adamw_alone_scales_hidden_matrices_by_width():
    model = Transformer(small(model_dim=64))
    groups = parameter_groups(model, TrainConfig(optimizer="adamw", adamw_lr=1e-3))
    rates = {g.role: (g.optimizer, g.lr) for g in groups}
    assert rates["hidden"] == rates["residual"] == ("adamw", 4e-3)
    own = TrainConfig(optimizer="adamw", adamw_lr=1e-3, adamw_matrix_lr=2e-3)
    rates = {g.role: g.lr for g in parameter_groups(model, own)}
    assert rates["hidden"] == 8e-3 and rates["head"] == 4e-3 and rates["gain"] == 1e-3


def test_initial_scales():
    config = small(model_dim=1024, num_experts=4, model_layers=2)
    model = Transformer(config)
    init_weights(model, TrainConfig(mup_base_dim=256))
    expected = {
        "embedding": 0.02,
        "hidden": 0.02 / 2,
        "residual": 0.02 / 2 / math.sqrt(4),
        "router": 0.02,
    }
    for name, parameter in model.named_parameters():
        role = role_of(name)
        if role in expected:
            assert parameter.std().item() == pytest.approx(expected[role], rel=0.05), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(role == "gain"))), name


def test_initial_loss_is_ln_259(variant):
    model = Transformer(variant)
    init_weights(model, TrainConfig())
    tokens_T, targets_T, positions_T, cu_seqlens_S = pack(DOCUMENTS)
    logits_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
    loss = cross_entropy_sum(logits_TV, targets_T) / len(targets_T)
    assert loss.item() == pytest.approx(math.log(259), abs=1e-6)


def test_schedule():
    factors = [lr_factor(s, 1000, 0.02, 0.1) for s in range(1000)]
    assert factors[0] == 1 / 20 and factors[19] == 1.0 and factors[999] == pytest.approx(0.1)
    assert max(factors) == 1.0 and all(
        a > b for a, b in zip(factors[19:], factors[20:], strict=False)
    )
    assert lr_factor(0, 50, 0.02, 0.1) == 1 / 10  # at least ten steps of warm-up
    assert lr_factor(509, 1000, 0.02, 0.1) == pytest.approx(0.55, abs=0.01)  # half the cosine


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_saved_state_continues_bit_for_bit(name):
    torch.manual_seed(0)
    models = [randomised(VARIANTS[name]) for _ in range(2)]
    optimizers = [HybridOptimizer(model, TrainConfig()) for model in models]
    gradients = [[torch.randn_like(p) for p in models[0].parameters()] for _ in range(4)]

    def steps(index, some):
        for gradient in some:
            for parameter, value in zip(models[index].parameters(), gradient, strict=True):
                parameter.grad = value.clone()
            optimizers[index].step(0.5)

    steps(0, gradients)
    steps(1, gradients[:2])
    state = {k: v.clone() for k, v in optimizers[1].state_dict().items()}
    optimizers[1] = HybridOptimizer(models[1], TrainConfig())
    optimizers[1].load_state_dict(state)
    steps(1, gradients[2:])
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert {k: v.dtype for k, v in optimizers[1].state_dict().items()} == {
        k: v.dtype for k, v in state.items()
    }

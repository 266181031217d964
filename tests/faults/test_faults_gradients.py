"""Faults of a step's arithmetic: ranks and experts without work, and all-zero gradients."""

import pytest
import torch
from fault_tools import gradients_of_step, poisoned
from helpers.models import DOCUMENTS, VARIANTS, randomised, small

from sparkgpt.data.stream import _lay_out, empty_window
from sparkgpt.distributed import Ranks, sum_gradients
from sparkgpt.loss import load_balance, router_summary
from sparkgpt.model.transformer import RouterStats
from sparkgpt.ops.experts import combine, dispatch, grouped_linear, sort_by_expert
from sparkgpt.optim.muon import Muon, orthogonalize

KINDS = ["dense", "moe"]
CPU = torch.device("cpu")


def real_window():
    documents = [torch.frombuffer(bytearray(d), dtype=torch.uint8).numpy() for d in DOCUMENTS if d]
    return _lay_out(documents, range(len(documents)), 400)


class Wire:
    """A second rank, played back: adds to each all-reduce what that rank had sent before."""

    def __init__(self, monkeypatch):
        self.sent, self.answers = [], []
        monkeypatch.setattr(torch.distributed, "all_reduce", self)

    def __call__(self, value, *arguments, **options):
        self.sent.append(value.clone())
        if self.answers:
            value += self.answers.pop(0)

    def send(self, model, windows, real_total, rank, answers=()):
        """(loss, gradients) of this rank, and what it sent."""
        self.sent, self.answers = [], list(answers)
        found = gradients_of_step(model, windows, real_total, Ranks(rank, 2, CPU))
        return found, self.sent


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_fault_02_a_rank_without_a_real_target_changes_nothing(kind, monkeypatch):
    model, full, empty = randomised(VARIANTS[kind]), real_window(), empty_window(400)
    loss, alone = gradients_of_step(model, [full], full.real_tokens)
    assert loss > 1 and all(g.isfinite().all() and g.abs().max() > 0 for g in alone.values())
    both_loss, both = gradients_of_step(model, [full, empty], full.real_tokens)
    assert both_loss == loss
    assert_equal(both, alone)
    wire = Wire(monkeypatch)
    _, of_empty = wire.send(model, [empty], full.real_tokens, 1)
    assert of_empty and all(torch.equal(x, torch.zeros_like(x)) for x in of_empty)
    (first_loss, first), of_full = wire.send(model, [full], full.real_tokens, 0, of_empty)
    (second_loss, second), _ = wire.send(model, [empty], full.real_tokens, 1, of_full)
    assert first_loss == second_loss == loss
    assert_equal(first, alone)
    assert_equal(second, alone)


def test_fault_02_a_rank_without_gradients_contributes_zeros(monkeypatch):
    model = torch.nn.Linear(3, 2)
    other = torch.arange(8.0)
    wire = Wire(monkeypatch)
    wire.answers = [other]
    with poisoned():
        sum_gradients(model.parameters(), Ranks(1, 2, CPU))
    assert torch.equal(wire.sent[0], torch.zeros(8))
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), other)


def with_an_unused_expert(unused):
    """A model whose routers all avoid one expert: the first coordinate is large everywhere, and
    only that expert's logit falls with it."""
    model = randomised(small(num_experts=4, moe_intermediate_size=32))
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] = 5
        for block in model.layers:
            block.post_attention_layernorm.weight[0] = 1
            block.moe.router.weight[:, 0] = 0
            block.moe.router.weight[unused] = 0
            block.moe.router.weight[unused, 0] = -100
    return model


@pytest.mark.parametrize("unused", [0, 2, 3])
def test_fault_05_an_expert_without_tokens_has_gradient_zero(unused):
    model, window = with_an_unused_expert(unused), real_window()
    _, router = model(window.tokens_T, window.positions_T, window.cu_seqlens_S)
    assert router.counts_LE.sum() == 3 * 2 * 400 and router.counts_LE[:, unused].sum() == 0
    with poisoned():
        loss, gradients = gradients_of_step(model, [window], window.real_tokens)
    assert loss > 0
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        if name.endswith(("moe.gate_up", "moe.down")):
            largest_E, layer = gradient.abs().amax((1, 2)), int(name.split(".")[1])
            assert largest_E[unused] == 0, name
            assert torch.equal(largest_E > 0, router.counts_LE[layer] > 0), name


def test_fault_06_without_any_row_all_experts_have_gradient_zero():
    x_TD = torch.randn(0, 6, requires_grad=True)
    matrix_EFD = torch.randn(4, 5, 6, requires_grad=True)
    expert_Tk = torch.empty(0, 2, dtype=torch.int64)
    with poisoned():
        order_R, inverse_R, offsets_E = sort_by_expert(expert_Tk, 4)
        y_RF = grouped_linear(dispatch(x_TD, order_R, inverse_R, 2), matrix_EFD, offsets_E)
        out_TF = combine(y_RF, torch.empty(0, 2), order_R, inverse_R)
        out_TF.sum().backward()
    assert offsets_E.tolist() == [0] * 4 and out_TF.shape == (0, 5) and x_TD.grad.shape == (0, 6)
    assert torch.equal(matrix_EFD.grad, torch.zeros(4, 5, 6))


def test_fault_06_a_batch_that_no_expert_counted_has_finite_figures():
    with poisoned():
        loss, gradients = gradients_of_step(randomised(VARIANTS["moe"]), [empty_window(300)], 0)
    assert loss == 0 and all(g.abs().max() == 0 for g in gradients.values())
    nothing = RouterStats(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3))
    assert load_balance(nothing.prob_sums_LE, nothing.counts_LE, 0).item() == 0
    figures = router_summary(nothing, 0)
    assert figures.pop("router/load") == [[0.0] * 4] * 3 and figures.pop("router/unused") == 12
    assert set(figures.values()) == {0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (6, 6)])
def test_fault_07_newton_schulz_of_zero_is_zero(shape, dtype):
    torch.manual_seed(0)
    other = torch.randn(shape, dtype=dtype)
    with poisoned():
        found = orthogonalize(torch.stack([torch.zeros(shape, dtype=dtype), other]))
    assert torch.equal(found[0], torch.zeros(shape, dtype=dtype))
    assert torch.allclose(found[1], orthogonalize(other[None])[0], atol=1e-2)
    assert 0.5 < torch.linalg.matrix_norm(found[1].float(), 2) < 1.5


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-44])
def test_fault_07_a_vanishing_gradient_moves_nothing_and_leaves_a_finite_momentum(size):
    stack = torch.nn.Parameter(torch.randn(3, 8, 4))
    before = stack.detach().clone()
    optimizer = Muon([stack], lr=0.02, momentum=0.95)
    for _ in range(3):
        stack.grad = torch.full_like(stack, size)
        optimizer.step()
        assert torch.allclose(stack, before, rtol=0, atol=1e-20)
        assert optimizer.state[stack]["momentum"].isfinite().all()

"""Head and cross-entropy in chunks: the kernel, the operation, and models that use it."""

import pytest
import torch
import torch.nn.functional as F
from helpers.interpreted import assert_as_exact, interpreted
from helpers.models import VARIANTS, small
from helpers.switched import (
    assert_equal_models,
    graphs_after_each,
    of_formulas,
    plain_and_switched,
    poison,
)

from sparkgpt.loss import cross_entropy_sum
from sparkgpt.ops import cross_entropy as ops
from sparkgpt.vocab import IGNORE_INDEX

kernels = interpreted("cross_entropy")

SIZES = [(1, 16, 259), (63, 24, 259), (100, 7, 5), (37, 40, 272)]  # T, D, V


def operands(positions, width, vocab, dtype=torch.float32):
    """States, weights, and targets of which a third is ignored."""
    generator = torch.Generator().manual_seed(positions)
    x = torch.randn(positions, width, generator=generator).to(dtype)
    weight = 0.5 * torch.randn(vocab, width, generator=generator)
    targets = torch.randint(vocab, (positions,), generator=generator)
    targets[1::3] = IGNORE_INDEX
    return x, weight, targets


def by_torch(x, weight, targets, exact=False):
    """Nats, and the gradients of x and the weight of their sum, by autograd."""
    x, weight = x.detach().clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(x, weight.to(x.dtype))
    nats = F.cross_entropy(logits if exact else logits.float(), targets, reduction="none")
    return nats.detach(), *torch.autograd.grad(nats.sum(), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_nats_and_gradients_are_as_exact_as_torch(size, dtype, monkeypatch):
    x, weight, targets = operands(*size, dtype)
    weight = weight.to(dtype).float()  # a rounding that both would share
    expected = by_torch(x, weight, targets)
    exact = by_torch(x.double(), weight.double(), targets, exact=True)
    poison(monkeypatch)
    found = kernels.head_nats(x, weight, targets, IGNORE_INDEX, chunk=40)
    for name, *values in zip(("nats", "x", "weight"), found, expected, exact, strict=True):
        assert_as_exact(*values, name)
    assert not found[0][1::3].any() and not found[1][1::3].any()


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_any_chunk_gives_the_same(chunk, monkeypatch):
    x, weight, targets = operands(50, 12, 259)
    expected = by_torch(x, weight, targets)
    poison(monkeypatch)
    for a, b in zip(
        kernels.head_nats(x, weight, targets, IGNORE_INDEX, chunk), expected, strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_large_and_equal_logits(monkeypatch):
    logits = torch.tensor([[300.0, -300.0, 0.0], [80.0, 80.0, 80.0], [-1e4, -1e4, -1e4]])
    padded = torch.cat([logits, torch.zeros(3, 13)], 1)
    targets = torch.tensor([1, 2, 0])
    poison(monkeypatch)
    nats = torch.empty(3)
    kernels.softmax_gradient_(padded, targets, nats, 3, IGNORE_INDEX)
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(nats, expected, rtol=1e-6) and not padded[:, 3:].any()
    assert torch.allclose(padded[:, :3], logits.softmax(1) - F.one_hot(targets, 3), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_formulas_equal_autograd_through_the_plain_path(size, monkeypatch):
    monkeypatch.setattr(ops, "CHUNK", 30)
    x, weight, targets = operands(*size)
    results = []
    for loss in (ops.head_nats_sum, lambda x, w, t: cross_entropy_sum(F.linear(x, w), t)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        nats = loss(*leaves, targets)
        assert nats.dtype == torch.float64
        results.append((nats, *torch.autograd.grad(nats / 3, leaves)))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_window_of_filler_gives_zero_and_zero_gradients(monkeypatch):
    x, weight, targets = operands(9, 8, 259)
    targets.fill_(IGNORE_INDEX)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    nats = ops.head_nats_sum(*leaves, targets)
    assert nats.item() == 0
    assert not any(grad.any() for grad in torch.autograd.grad(nats, leaves))
    poison(monkeypatch)
    assert not any(v.any() for v in kernels.head_nats(x, weight, targets, IGNORE_INDEX))


def test_the_operation_is_registered_well():
    x, weight, targets = operands(9, 8, 20)
    given = (x.requires_grad_(), weight.requires_grad_(), targets)
    torch.library.opcheck(ops._head_nats, given)


@of_formulas
@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_a_model_computes_the_same(variant):
    assert_equal_models(*plain_and_switched(VARIANTS[variant], head=True))


@pytest.mark.parametrize("experts", [0, 4])
def test_one_graph_serves_windows_of_any_number_of_documents(experts, monkeypatch):
    config = small(model_layers=1, num_experts=experts, moe_intermediate_size=32)
    _, model = plain_and_switched(config, head=True, dispatch=True)
    assert graphs_after_each(model, (3, 1, 5, 12), monkeypatch) == [1, 2, 2, 2]

"""Muon against torch.optim.Muon and an fp64 reference."""

import pytest
import torch

from sparkgpt.optim.muon import COEFFICIENTS, EPS, Muon, orthogonalize


def reference(gradients, weight, lr, momentum):
    """Muon in fp64, written from the formulas."""
    weight, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.double()
        buffer = momentum * buffer + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * buffer
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=EPS)
        a, b, c = COEFFICIENTS
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x
        weight = weight - lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x
    return weight


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40), (96, 16)])
def test_error_is_at_most_that_of_torch(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(4)]
    expected = reference(gradients, start, 0.02, 0.95)
    errors = []
    for build in (
        lambda p: Muon([p], lr=0.02, momentum=0.95),
        lambda p: torch.optim.Muon([p], lr=0.02, momentum=0.95, weight_decay=0.0),
    ):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = build(parameter)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        errors.append((parameter.detach().double() - expected).abs().max().item())
    ours, theirs = errors
    assert ours <= theirs and ours < 1e-5


def test_a_stack_of_experts_equals_each_matrix_alone():
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(5, 24, 16))
    alone = [torch.nn.Parameter(stack.data[i].clone()) for i in range(5)]
    together = Muon([stack], lr=0.02, momentum=0.95)
    separate = [Muon([p], lr=0.02, momentum=0.95) for p in alone]
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        together.step()
        for i, optimizer in enumerate(separate):
            alone[i].grad = stack.grad[i].clone()
            optimizer.step()
    assert torch.allclose(stack, torch.stack(list(alone)), atol=1e-6)


def test_singular_values_end_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(2, 64, 32)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_an_all_zero_gradient_moves_nothing():
    parameter = torch.nn.Parameter(torch.randn(8, 4))
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([parameter], lr=0.02, momentum=0.95).step()
    assert torch.equal(parameter, before)

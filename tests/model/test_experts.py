"""Expert dispatch: exact against a loop, and clean where an expert gets no rows."""

import pytest
import torch

from sparkgpt.ops.experts import combine, dispatch, grouped_linear, sort_by_expert


def by_loop(x_TD, expert_Tk, weight_Tk, matrix_EFD):
    out = torch.zeros(len(x_TD), matrix_EFD.shape[1], dtype=x_TD.dtype)
    for t in range(len(x_TD)):
        for choice, expert in enumerate(expert_Tk[t].tolist()):
            out[t] = out[t] + weight_Tk[t, choice] * (matrix_EFD[expert] @ x_TD[t])
    return out


def by_ops(x_TD, expert_Tk, weight_Tk, matrix_EFD):
    order_R, inverse_R, offsets_E = sort_by_expert(expert_Tk, len(matrix_EFD))
    rows_RD = dispatch(x_TD, order_R, inverse_R, expert_Tk.shape[1])
    return combine(grouped_linear(rows_RD, matrix_EFD, offsets_E), weight_Tk, order_R, inverse_R)


CHOICES = {
    "spread": torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]]),
    "one gets all": torch.tensor([[1, 2], [1, 2], [1, 2]]),
    "some get nothing": torch.tensor([[3, 0], [0, 3]]),
    "one position": torch.tensor([[2, 1]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_outputs_and_gradients_equal_a_loop(name):
    torch.manual_seed(0)
    expert_Tk = CHOICES[name]
    x = torch.randn(len(expert_Tk), 6, dtype=torch.float64, requires_grad=True)
    w = torch.rand(expert_Tk.shape, dtype=torch.float64, requires_grad=True)
    m = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    out, expected = by_ops(x, expert_Tk, w, m), by_loop(x, expert_Tk, w, m)
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, w, m), grad)
    wanted = torch.autograd.grad(expected, (x, w, m), grad)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_an_expert_without_rows_gets_zero_gradient(monkeypatch):
    poison = torch.empty

    def poisoned(*args, **kwargs):
        tensor = poison(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    x = torch.randn(2, 6, requires_grad=True)
    m = torch.randn(4, 5, 6, requires_grad=True)
    by_ops(x, CHOICES["some get nothing"], torch.ones(2, 2), m).sum().backward()
    assert torch.equal(m.grad[1:3], torch.zeros(2, 5, 6))
    assert torch.isfinite(m.grad).all() and m.grad[0].abs().max() > 0


def test_order_is_stable_and_inverse():
    expert_Tk = torch.tensor([[1, 0], [1, 0], [0, 1]])
    order_R, inverse_R, offsets_E = sort_by_expert(expert_Tk, 3)
    assert order_R.tolist() == [1, 3, 4, 0, 2, 5]
    assert order_R[inverse_R].tolist() == list(range(6))
    assert offsets_E.tolist() == [3, 6, 6] and offsets_E.dtype == torch.int32

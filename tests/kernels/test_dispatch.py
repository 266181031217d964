"""Dispatch and combine: the kernels, the operations around them, and a model that uses them."""

import pytest
import torch
from helpers.interpreted import assert_as_exact, interpreted
from helpers.models import VARIANTS, small
from helpers.switched import (
    assert_equal_models,
    graphs_after_each,
    of_formulas,
    plain_and_switched,
    poison,
)

from sparkgpt.ops import dispatch as ops
from sparkgpt.ops import experts
from sparkgpt.ops.experts import sort_by_expert

kernels = interpreted("dispatch")

SIZES = [(1, 1, 1), (63, 2, 48), (5, 3, 7), (70, 4, 130), (9, 8, 1030)]  # T, k, D


def choices(positions, k, experts=8, seed=0):
    """k distinct experts for each position, and their order."""
    generator = torch.Generator().manual_seed(seed)
    expert_Tk = torch.rand(positions, experts, generator=generator).topk(k).indices
    return sort_by_expert(expert_Tk, experts)


def by_kernels(x, w, grad_rows, grad_out, inverse, k):
    """All four passes: rows, gradient of x; output, gradients of rows and weights."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        rows = kernels.dispatch(x, inverse, k)
        out = kernels.combine(rows, w, inverse, k)
        grad_y, grad_w = kernels.combine_backward(grad_out, rows, w, inverse)
        return rows, kernels.combine(grad_rows, None, inverse, k), out, grad_y, grad_w


def by_torch(x, w, grad_rows, grad_out, order, inverse, k):
    """The same by autograd through the plain path."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    rows = experts.dispatch(x, order, inverse, k)
    y = rows.detach().requires_grad_()
    out = experts.combine(y, w, order, inverse)
    grads = torch.autograd.grad(out, (y, w), grad_out)
    (grad_x,) = torch.autograd.grad(rows, x, grad_rows)
    return rows.detach(), grad_x, out.detach(), *grads


def operands(positions, k, width, dtype):
    torch.manual_seed(1)
    shapes = (positions, width), (positions, k), (positions * k, width), (positions, width)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_each_pass_is_as_exact_as_torch(size, dtype):
    positions, k, width = size
    order, inverse, _ = choices(positions, k)
    given = operands(*size, dtype)
    ours = by_kernels(*given, inverse, k)
    plain = by_torch(*given, order, inverse, k)
    exact = by_torch(*(x.double() for x in given), order, inverse, k)
    names = ("rows", "grad of x", "out", "grad of rows", "grad of weights")
    for name, *found in zip(names, ours, plain, exact, strict=True):
        assert found[0].dtype == dtype
        assert_as_exact(*found, name)


def test_all_positions_to_one_expert_and_seven_experts_empty():
    order, inverse, ends = sort_by_expert(torch.full((40, 1), 3), 8)
    assert ends.tolist() == [0, 0, 0] + [40] * 5
    given = operands(40, 1, 24, torch.float32)
    for ours, plain in zip(
        by_kernels(*given, inverse, 1), by_torch(*given, order, inverse, 1), strict=True
    ):
        assert torch.allclose(ours, plain, atol=1e-6)


def test_any_config_gives_the_same():
    _, inverse, _ = choices(21, 2)
    x = operands(21, 2, 50, torch.float32)[0]
    config = kernels.Config({"BLOCK_T": 8, "BLOCK_D": 16})
    rows = kernels.dispatch(x, inverse, 2)
    assert torch.equal(kernels.dispatch(x, inverse, 2, config), rows)
    ours = kernels.combine(rows, None, inverse, 2, config)
    assert torch.equal(ours, kernels.combine(rows, None, inverse, 2))


def test_the_grid_holds_70000_documents_of_one_expert_row_each():
    for width in (1, 512, 1024, 5000):
        config = kernels.default_config(width)
        (programs,) = kernels._grid(70_000, config)
        assert programs * config.tiles["BLOCK_T"] >= 70_000 and programs < 2**31


def test_the_operations_are_registered_well():
    _, inverse, _ = choices(6, 2)
    x, w, grad_rows, grad = operands(6, 2, 5, torch.float32)
    torch.library.opcheck(ops._dispatch, (x.clone().requires_grad_(), inverse, 2))
    torch.library.opcheck(ops._dispatch_backward, (grad_rows, inverse, 2))
    y, w = grad_rows.requires_grad_(), w.requires_grad_()
    torch.library.opcheck(ops._combine, (y, w, inverse))
    torch.library.opcheck(ops._combine_backward, (grad, y.detach(), w.detach(), inverse))


@pytest.mark.parametrize("size", SIZES)
def test_formulas_equal_autograd_through_the_plain_path(size):
    positions, k, width = size
    order, inverse, _ = choices(positions, k)
    x, w, grad_rows, grad_out = (v.double() for v in operands(*size, torch.float32))
    expected = by_torch(x, w, grad_rows, grad_out, order, inverse, k)
    x, w = x.requires_grad_(), w.requires_grad_()
    rows = ops.fused_dispatch(x, inverse, k)
    y = rows.detach().requires_grad_()
    out = ops.fused_combine(y, w, inverse)
    found = (
        rows,
        *torch.autograd.grad(rows, x, grad_rows),
        out,
        *torch.autograd.grad(out, (y, w), grad_out),
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)  # float32 inside


@of_formulas
@pytest.mark.parametrize("variant", ["moe", "moe-top3", "moe-sparse-step"])
def test_a_model_computes_the_same(variant):
    assert_equal_models(*plain_and_switched(VARIANTS[variant], dispatch=True))


def test_one_graph_serves_windows_of_any_number_of_documents(monkeypatch):
    config = small(model_layers=1, num_experts=4, moe_intermediate_size=32)
    _, model = plain_and_switched(config, dispatch=True)
    assert graphs_after_each(model, (3, 1, 5, 12), monkeypatch) == [1, 2, 2, 2]

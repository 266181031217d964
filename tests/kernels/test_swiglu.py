"""The fused SwiGLU MLP: its formulas, its kernels in the interpreter, and the model with it on."""

import pytest
import torch
import torch.nn.functional as F
from helpers.interpreted import assert_as_exact, interpreted, poisoned
from helpers.models import DOCUMENTS, VARIANTS, pack, randomised

from sparkgpt.model import Transformer
from sparkgpt.model.mlp import swiglu
from sparkgpt.ops import swiglu as ops
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.experts import grouped_linear
from sparkgpt.ops.kernels.specimen import Config

grouped = interpreted("grouped")
kernels = interpreted("swiglu")

# (D, F, rows of each expert)
CASES = {
    "one row": (48, 24, [1]),
    "dense, odd": (40, 24, [63]),
    "dense, long": (17, 9, [1000]),
    "empty experts": (24, 33, [0, 37, 0, 0, 5, 0]),
    "all to one": (33, 16, [0, 0, 50, 0]),
    "many": (8, 8, [1, 2, 3, 0, 1, 16, 17, 1, 0]),
    "no row": (16, 16, [0, 0]),
}
TILES = 16  # small, so that every case has edges, and most more than one tile each way


def tiny(candidates):
    """A configuration of a kernel with small tiles."""
    return Config(dict.fromkeys(candidates[0].tiles, TILES))


def inputs(name, dtype=torch.float64, seed=0):
    """x, gate_up, down, offsets, the output's gradient; in fp64 what `dtype` holds exactly."""
    width, hidden, counts = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    experts, rows = len(counts), sum(counts)
    x = draw(rows, width)
    gate_up = (draw(experts, 2 * hidden, width) * width**-0.5).to(dtype)
    down = (draw(experts, width, hidden) * hidden**-0.5).to(dtype)
    return x, gate_up, down, torch.tensor(counts).cumsum(0).to(torch.int32), draw(rows, width)


def with_gradients(function, x, gate_up, down, offsets, grad):
    """Output and the gradients of x, gate_up and down by autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate_up, down)]
    out = function(*leaves, offsets)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def plain(x, gate_up, down, offsets):
    """As the model computes it without kernels."""
    return grouped_linear(swiglu(grouped_linear(x, gate_up, offsets)), down, offsets)


@pytest.mark.parametrize("name", CASES)
def test_formulas_equal_autograd_of_the_plain_path(name):
    arguments = inputs(name)
    ours = with_gradients(ops.swiglu_mlp, *arguments)
    for a, b in zip(ours, with_gradients(plain, *arguments), strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)


def by_kernels(x, gate_up, down, offsets, grad, tiles):
    """Everything that the kernels compute, forward and backward, with a tiling function."""
    hidden, acts = kernels.swiglu_forward(x, gate_up, offsets, tiles(kernels.FORWARD))
    y = grouped.grouped_matmul(hidden, down, offsets, config=tiles(grouped.MATMUL))
    d_hidden = grouped.grouped_matmul(grad, down, offsets, True, tiles(grouped.MATMUL))
    d_down = grouped.grouped_outer(grad, hidden, offsets, tiles(grouped.OUTER))
    d_x = kernels.swiglu_dgrad(d_hidden, acts, gate_up, offsets, tiles(kernels.DGRAD))
    d_gate_up = kernels.swiglu_wgrad(d_hidden, acts, x, offsets, tiles(kernels.WGRAD))
    return y, d_x, d_gate_up, d_down


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Every buffer that a launcher makes is full of NaN."""
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: poisoned(*shape, dtype=dtype))


def errors_of(name, dtype, seed, tiles):
    """Per result: ours, the plain path's in the same dtype, and in float64."""
    arguments = [t if t.dtype == torch.int32 else t.to(dtype) for t in inputs(name, dtype, seed)]
    wide = [t if t.dtype == torch.int32 else t.double() for t in arguments]
    ours = by_kernels(*arguments, tiles=tiles)
    return ours, with_gradients(plain, *arguments), with_gradients(plain, *wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_plain_path(name, dtype, empty_is_nan):
    # Of a few numbers the largest error is luck, so the small cases are drawn more than once.
    seeds = range(1 if sum(CASES[name][2]) > 40 else 8)
    drawn = [errors_of(name, dtype, seed, tiny) for seed in seeds]
    for index, output in enumerate(("y", "d_x", "d_gate_up", "d_down")):
        pooled = [torch.cat([found[kind][index].flatten() for found in drawn]) for kind in range(3)]
        assert_as_exact(*pooled, f"{name}: {output}")

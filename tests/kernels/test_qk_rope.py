"""Norm and rotation of queries and keys in one pass: kernel, operator and model."""

import pytest
import torch
from helpers.interpreted import assert_as_exact, interpreted
from helpers.models import VARIANTS
from helpers.switched import assert_equal_models, of_formulas, plain_and_switched, poison

from sparkgpt.model import Transformer
from sparkgpt.ops import qk_rope as ops
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.norm import rms_norm
from sparkgpt.ops.rope import apply_rope, rope_tables

family = interpreted("qk_rope")
EPS = 1e-6
# Positions, query heads, key/value heads, head dimension: GQA 1, 2, 4, and a half that is no power
# of 2.
SHAPES = [(1, 2, 2, 64), (63, 4, 2, 128), (130, 4, 1, 64), (17, 2, 1, 96)]


def inputs(shape, dtype):
    """qkv, gains, tables, and gradients of q, k and v."""
    tokens, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    qkv = 3 * torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    qkv[0, 0] = 0  # a head of zeros: only EPS keeps its norm finite
    gains = 1 + 0.3 * torch.randn(2, head_dim)
    tables = rope_tables(torch.randint(0, 4096, (tokens,)), head_dim, 1e6, dtype)
    grads = [torch.randn(tokens, n, head_dim).to(dtype) for n in (heads, kv_heads, kv_heads)]
    return qkv.to(dtype), *gains, *tables, grads


def plain(qkv, q_gain, k_gain, cos, sin, grads, kv_heads, dtype):
    """The plain path in `dtype` by autograd: q, k, and gradients of qkv and both gains."""
    leaves = [x.to(dtype).requires_grad_() for x in (qkv, q_gain, k_gain)]
    q, k, v = ops.split_heads(leaves[0], kv_heads)
    tables = cos.to(dtype), sin.to(dtype)
    if dtype == torch.float64:  # rms_norm computes in float32 by definition
        norm = lambda x, gain: gain * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    else:
        norm = lambda x, gain: rms_norm(x, gain, EPS)
    q, k = apply_rope(norm(q, leaves[1]), *tables), apply_rope(norm(k, leaves[2]), *tables)
    found = torch.autograd.grad((q, k, v), leaves, [g.to(dtype) for g in grads])
    return [x.detach() for x in (q, k, *found)]


def by_kernels(qkv, q_gain, k_gain, cos, sin, grads, kv_heads, dtype):
    small = {"ROWS": 8}
    q, k = family.forward(qkv, q_gain, k_gain, cos, sin, kv_heads, EPS, family.Config(small))
    config = family.Config(small | {"PROGRAMS": 5})
    return q, k, *family.backward(*grads, qkv, q_gain, k_gain, cos, sin, EPS, config)


def by_reference(qkv, q_gain, k_gain, cos, sin, grads, kv_heads, dtype):
    q, k = ops.qk_rope_forward(qkv, q_gain, k_gain, cos, sin, kv_heads, EPS)
    return q, k, *ops.qk_rope_backward(*grads, qkv, q_gain, k_gain, cos, sin, EPS)


@pytest.fixture
def nan_filled(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("found_by", [by_kernels, by_reference])
def test_error_is_at_most_twice_the_plain_path_s(found_by, shape, dtype, nan_filled):
    values = inputs(shape, dtype)
    found = found_by(*values, shape[2], dtype)
    same = plain(*values, shape[2], dtype)
    exact = plain(*values, shape[2], torch.float64)
    for name, *three in zip(
        ("q", "k", "dqkv", "dq_gain", "dk_gain"), found, same, exact, strict=True
    ):
        assert_as_exact(*three, name)


def test_strided_gradients_and_equal_bits_twice():
    *values, grads = inputs((33, 4, 2, 64), torch.float32)
    turned = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    whole = torch.cat(grads, 1).split([g.shape[1] for g in grads], 1)
    first = by_kernels(*values, grads, 2, torch.float32)
    for other in (grads, turned, whole):
        again = by_kernels(*values, other, 2, torch.float32)
        assert all(map(torch.equal, first, again))


def test_the_operators_keep_their_contracts():
    qkv, q_gain, k_gain, cos, sin, grads = inputs((5, 4, 2, 64), torch.float32)
    both = (q_gain, k_gain, cos, sin)
    torch.library.opcheck(ops.qk_rope_forward, (qkv, *both, 2, EPS))
    torch.library.opcheck(ops.qk_rope_backward, (*grads, qkv, *both, EPS))


@pytest.mark.cpu("float64 is for the formulas alone")
def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    qkv, *gains = (torch.randn(*s, dtype=torch.float64) for s in ((3, 4, 6), (6,), (6,)))
    leaves = [x.requires_grad_() for x in (qkv, *gains)]
    tables = rope_tables(torch.arange(3), 6, 1e4, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: ops.qk_rope(*x, *tables, 1, EPS), leaves)


@of_formulas
def test_the_model_is_the_same_with_it(variant):
    assert_equal_models(*plain_and_switched(variant, qk_rope=True))


def test_one_graph_without_a_break():
    model = Transformer(VARIANTS["dense"], kernels=Kernels(qk_rope=True)).layers[0].attention
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x_TD = torch.randn(20, VARIANTS["dense"].model_dim, requires_grad=True)
    tables = rope_tables(torch.arange(20), 16, 1e6, torch.float32)
    run = lambda project: torch.autograd.grad(sum(y.sum() for y in project(x_TD, *tables)), x_TD)
    compiled = torch.compile(model.project, backend="aot_eager", fullgraph=True)
    assert torch.allclose(run(compiled)[0], run(model.project)[0], atol=1e-5)

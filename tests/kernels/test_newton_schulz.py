"""Muon's kernels: products, momentum, and the whole iteration."""

import functools

import pytest
import torch
from helpers.interpreted import assert_as_exact, interpreted
from helpers.switched import poison

from sparkgpt.optim import muon
from sparkgpt.optim.muon import EPS, Muon, directions_by_kernels, orthogonalize

kernels = interpreted("newton_schulz")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every output of a kernel starts as NaN."""
    poison(monkeypatch)


def dense(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [(1, 1, 1), (70, 33, 65), (33, 130, 40), (128, 63, 1)])
def test_products_are_as_exact_as_torch(size, dtype):
    rows, columns, inner = size
    a, b = dense(2, rows, inner, dtype=dtype), dense(2, inner, columns, dtype=dtype)
    c, scale = dense(2, rows, columns, dtype=dtype), torch.tensor([0.5, 2.0])
    a_transposed, b_transposed = a.mT.contiguous().mT, b.mT.contiguous().mT
    exact = a.double() @ b.double()
    for left, right in ((a, b), (a_transposed, b), (a, b_transposed)):
        assert_as_exact(kernels.gemm(left, right), a @ b, exact)
    found = kernels.gemm(a, b, alpha=-1.5, c_BMN=c, beta=0.7, scale_B=scale)
    same = (torch.baddbmm(c, a, b, beta=0.7, alpha=-1.5) * scale[:, None, None]).to(dtype)
    exact = (0.7 * c.double() - 1.5 * exact) * scale[:, None, None]
    assert_as_exact(found, same, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 1, 5), (2, 70, 90), (1, 130, 33)])
def test_symmetric_products_are_mirrored(shape, dtype):
    x = dense(*shape, dtype=dtype)
    for left, right in ((x, x.mT), (x.mT, x)):
        gram = kernels.gemm(left, right, symmetric=True)
        assert torch.equal(gram, gram.mT)
        assert_as_exact(gram, left @ right, left.double() @ right.double())
        found = kernels.gemm(gram, gram, alpha=0.3, c_BMN=gram, beta=-2.0, symmetric=True)
        exact = 0.3 * gram.double() @ gram.double() - 2 * gram.double()
        if exact.abs().max() < torch.finfo(dtype).max:
            same = torch.baddbmm(gram, gram, gram, beta=-2.0, alpha=0.3)
            assert_as_exact(found, same, exact)


def test_products_are_added_up_in_place():
    total = dense(2, 40, 70)
    expected, a, b = total.clone(), dense(2, 50, 40, dtype=torch.float16), dense(2, 50, 70).half()
    out = kernels.gemm(a.mT, b, c_BMN=total, beta=1.0, out_BMN=total)
    assert out is total
    assert torch.allclose(total, expected + a.float().mT @ b.float(), atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (7, 3), (3, 65, 70), (1, 1)])
def test_momentum_and_look_ahead_equal_torch(shape):
    gradients = [dense(i + 1, *shape)[i] for i in range(3)]
    averages = [dense(i + 7, *shape)[i] for i in range(3)]
    expected = [average.lerp(g, 1 - 0.95) for g, average in zip(gradients, averages, strict=True)]
    looks = [g.lerp(average, 0.95) for g, average in zip(gradients, expected, strict=True)]
    batch, squares = kernels.look_ahead(gradients, averages, 0.95, torch.float32)
    assert torch.allclose(torch.stack(averages), torch.stack(expected), rtol=1e-6, atol=1e-7)
    assert torch.allclose(batch, torch.stack(looks).view(batch.shape), rtol=1e-6, atol=1e-6)
    assert len(squares[0]) == -(-shape[-1] * shape[-2] // 4096)
    assert torch.allclose(squares.sum(1), batch.square().sum((1, 2)), rtol=1e-5)
    assert batch.shape[1:] == shape[-2:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(48, 96), (70, 40), (3, 33, 24), (2, 17, 40), (1, 5)])
def test_directions_are_as_exact_as_the_reference(shape, dtype):
    gradients = [dense(2, *shape)[i] for i in range(2)]
    averages = [0.1 * dense(3, *shape)[i] for i in range(2)]
    looks = [
        g.double().lerp(average.double().lerp(g.double(), 0.05), 0.95)
        for g, average in zip(gradients, averages, strict=True)
    ]
    batch = torch.stack(looks).view(-1, *shape[-2:]).cpu()  # on CUDA `orthogonalize` is in bfloat16
    found = directions_by_kernels(gradients, averages, 0.95, dtype)
    assert_as_exact(found.cpu(), orthogonalize(batch.to(dtype)), orthogonalize(batch))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of what overflows
def test_a_norm_of_zero_or_beyond_float32_gives_zero():
    gradients = [torch.zeros(40, 24), torch.full((40, 24), 3e30), dense(40, 24)]
    averages = [torch.zeros(40, 24) for _ in gradients]
    found = directions_by_kernels(gradients, averages, 0.95, torch.float32)
    assert not found[:2].any() and not averages[0].any()
    assert torch.isfinite(found[2]).all() and found[2].abs().max() > EPS


def steps(shape, kernels, count=3):
    parameter = torch.nn.Parameter(dense(*shape))
    optimizer = Muon([parameter], lr=0.02, momentum=0.95, kernels=kernels)
    for i in range(count):
        parameter.grad = dense(*shape, 1 + i)[..., i]
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["momentum"]


@pytest.mark.cpu("on CUDA the kernels compute")
def test_on_a_cpu_the_switch_changes_no_bit():
    for plain, switched in zip(steps((24, 16), False), steps((24, 16), True), strict=True):
        assert torch.equal(plain, switched)


@pytest.mark.cpu("on CUDA the reference computes in bfloat16")
@pytest.mark.parametrize("shape", [(24, 40), (4, 40, 24)])
def test_steps_by_kernels_equal_the_reference(shape, monkeypatch):
    plain = steps(shape, False)
    directions = functools.partial(directions_by_kernels, dtype=torch.float32)
    monkeypatch.setattr(muon, "directions_by_kernels", directions)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for ours, expected in zip(steps(shape, True), plain, strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


def test_tiles_come_from_the_shape_alone():
    sides = lambda *args: tuple(kernels.default_config(*args).tiles.values())[:2]
    assert sides(512, 3072, torch.bfloat16) == (128, 128)
    assert sides(64, 3072, torch.bfloat16) == sides(512, 512, torch.float32) == (64, 64)

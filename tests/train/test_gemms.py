"""--autotune-gemm: what is set while a graph is compiled, and that nothing of it stays."""

import dataclasses

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config, utils

from sparkgpt.config import TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.train import gemms
from sparkgpt.train.build import tunes_gemms

REAL = utils.is_big_gpu


def test_installed_torch_has_the_gate_and_the_options():
    assert callable(REAL) and REAL.__module__ == utils.__name__
    for name, value in gemms.OPTIONS.items():
        assert type(getattr(config, name)) is type(value)


def test_gate_is_open_inside_and_as_before_after():
    with pytest.raises(ZeroDivisionError), gemms.every_gpu_is_big():
        assert utils.is_big_gpu(0) and utils.is_big_gpu(torch.device("cuda", 0))
        raise ZeroDivisionError
    assert utils.is_big_gpu is REAL


def test_forward_and_backward_are_compiled_with_it(monkeypatch):
    seen = []

    def watched(graph, inputs, **options):
        set_now = {name: getattr(config, name) for name in gemms.OPTIONS}
        seen.append((options.get("is_backward", False), utils.is_big_gpu is REAL, set_now))
        return make_boxed_func(graph.forward)  # what inductor would make of it takes 20 s here

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    torch._dynamo.reset()
    before = {name: getattr(config, name) for name in gemms.OPTIONS}
    x = torch.randn(3, 4, requires_grad=True)
    gemms.compile_tuning_gemms(lambda x: (x @ x.T).tanh().sum())(x).backward()
    assert [backward for backward, *_ in seen] == [False, True]
    assert all(not closed and options == gemms.OPTIONS for _, closed, options in seen)
    assert utils.is_big_gpu is REAL
    assert before == {name: getattr(config, name) for name in gemms.OPTIONS}
    grad, x.grad = x.grad, None
    (x @ x.T).tanh().sum().backward()
    assert torch.allclose(grad, x.grad, atol=1e-5)


def test_a_torch_without_the_gate_is_named(monkeypatch, capsys):
    monkeypatch.delattr(utils, "is_big_gpu")
    gemms.compile_tuning_gemms(lambda x: x)
    assert "has no torch._inductor.utils.is_big_gpu" in capsys.readouterr().err
    with gemms.every_gpu_is_big():
        assert not hasattr(utils, "is_big_gpu")


@pytest.mark.parametrize(
    "device, flags, expected",
    [
        ("cpu", {}, False),
        ("cpu", {"compile": True}, False),
        ("cpu", {"autotune_gemm": True}, False),  # nothing is compiled
        ("cpu", {"autotune_gemm": True, "compile": True}, True),
        ("cuda", {}, True),
        ("cuda", {"autotune_gemm": False}, False),
        ("cuda", {"compile": False}, False),
    ],
)
def test_when_it_tunes(device, flags, expected):
    ranks = dataclasses.replace(Ranks(0, 1, torch.device("cpu")), device=torch.device(device))
    assert tunes_gemms(TrainConfig(**flags), ranks) == expected

"""The split of a step by kind of operation, on made-up events and on real ones."""

from types import SimpleNamespace

import pytest
import torch

from sparkgpt.bench.split import DATA, OPTIMIZER, STEP, category, profile_steps, split


def event(name, microseconds=0.0, caller=None):
    return SimpleNamespace(name=name, self_cpu_time_total=microseconds, cpu_parent=caller)


def made_up():
    step = event(STEP, 10)
    data, optimizer = event(DATA, 1, step), event(OPTIMIZER, 2, step)
    linear = event("aten::linear", 1, step)
    sdpa = event("aten::scaled_dot_product_attention", 1, step)
    tiles = event("_TileAttentionBackward", 3, step)
    node = event("autograd::engine::evaluate_function: MmBackward0", 4, step)
    return [
        step, data, optimizer, linear, sdpa, tiles, node,
        event("aten::copy_", 4, data),
        event("aten::mm", 8, optimizer),
        event("aten::mm", 20, linear),
        event("aten::_scaled_dot_product_flash_attention_for_cpu", 9, sdpa),
        event("aten::bmm", 7, tiles),
        event("aten::mm", 11, node),
        event("aten::silu_backward", 5, step),
        event("_RMSNormBackward", 6, step),
        event("someone::new_kernel", 12, step),
        event("aten::mm", 1000),  # outside of any step
    ]  # fmt: skip


def test_shares_by_category():
    result = split(made_up())
    expected = {"gemm": 32, "attention": 20, "elementwise": 11, "optimizer": 10, "data": 5}
    expected["other"] = 10 + 4 + 12
    total = sum(expected.values())
    assert result["seconds"] == pytest.approx({k: v / 1e6 for k, v in expected.items()})
    assert result["shares"] == pytest.approx({k: v / total for k, v in expected.items()})
    assert sum(result["shares"].values()) == pytest.approx(1, abs=1e-12)


def test_unknown_operations_are_listed():
    result = split(made_up())
    assert list(result["other"]) == [
        "someone::new_kernel", "Python between operations", "autograd's engine",
    ]  # fmt: skip
    assert sum(result["other"].values()) == pytest.approx(result["shares"]["other"])


def test_no_step_is_an_error():
    with pytest.raises(ValueError, match=STEP):
        split([event("aten::mm", 5)])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("aten::addmm", "gemm"),
        ("aten::_grouped_mm", "gemm"),
        ("aten::mmm", "other"),
        ("aten::t", "elementwise"),
        ("aten::tan", "other"),
        ("aten::_log_softmax_backward_data", "elementwise"),
        ("aten::_local_scalar_dense", "elementwise"),
        ("MulBackward0", "other"),
        ("_Dispatch", "elementwise"),
    ],
)
def test_names(name, kind):
    assert category(event(name, caller=event(STEP))) == kind


def test_real_events():
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)

    def step(index):
        with torch.profiler.record_function(DATA):
            x.normal_()
        torch.nn.functional.silu(x @ weight).sum().backward()
        with torch.profiler.record_function(OPTIMIZER), torch.no_grad():
            weight.sub_(weight.grad @ weight)

    shares = profile_steps(step, range(2))["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(shares[kind] > 0 for kind in ("gemm", "elementwise", "optimizer", "data", "other"))
    assert shares["attention"] == 0

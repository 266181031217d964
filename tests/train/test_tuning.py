"""Configurations of kernels: how they are measured, recorded and handed to the launchers."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparkgpt import autotune
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.errors import UserError
from sparkgpt.files import write_json
from sparkgpt.ops import tuning
from sparkgpt.ops.choices import (
    Kernels,
    attention_key,
    kernel_code,
    kernel_configs,
    shape_text,
)
from sparkgpt.ops.kernels.specimen import Config, Tunable, config_of
from sparkgpt.train.build import attention_backend, build_model
from sparkgpt.train.run import check_agreement

CPU = torch.device("cpu")
DEVICE = {"type": "cuda", "name": "NVIDIA GB10", "capability": "12.1", "memory_bytes": 1}
SMALL, WIDE, WRONG = (
    Config({"BLOCK_M": m, "BLOCK_N": 64}, num_warps=4, num_stages=3) for m in (16, 128, 32)
)
X = torch.linspace(-1, 1, 8, dtype=torch.bfloat16)


LAUNCHED = []


def fake(run, candidates=(WIDE, WRONG)):
    """A kernel of a family that exists nowhere."""

    def launch(config):
        LAUNCHED.append(config)
        return run(config)

    return Tunable("fake", shape_text(F=8, D=4), "forward", SMALL, candidates, launch)


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds by the rows of the tile that was launched: the more, the fewer."""

    def milliseconds(action, device):
        action()
        return [1000 / LAUNCHED[-1].tiles["BLOCK_M"]] * 3

    monkeypatch.setattr(tuning, "milliseconds", milliseconds)


def test_a_configuration_is_text_and_back():
    assert WIDE.text == "BLOCK_M=128,BLOCK_N=64,warps=4,stages=3"
    assert Config.parse(WIDE.text) == WIDE
    for text in ("", "BLOCK_M=128", "BLOCK_M=x,warps=4,stages=3", "BLOCK_M=0,warps=4,stages=3"):
        with pytest.raises(ValueError):
            Config.parse(text)


def test_fastest_that_agrees_wins(clock):
    entry = tuning.tune(fake(lambda config: [X]), CPU)
    assert entry["winner"] == WIDE.text and entry["default"] == SMALL.text
    assert len(entry["candidates"]) == 3


@pytest.mark.parametrize("value", [float("nan"), 1.1])
def test_a_faster_one_with_other_numbers_does_not_win(clock, value):
    wrong = lambda config: [X if config == SMALL else torch.where(X == X[2], value, X)]
    entry = tuning.tune(fake(wrong, (WIDE,)), CPU)
    assert entry["winner"] == SMALL.text and not entry["candidates"][WIDE.text]["agrees"]


def test_a_sum_in_another_order_agrees_and_integers_must_be_equal():
    assert tuning.close(X + X.abs().max() * 2**-8, X)
    assert not tuning.close(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert tuning.close(torch.empty(0), torch.empty(0))


def test_one_that_does_not_launch_is_recorded_with_its_reason(clock):
    def run(config):
        if config == WIDE:
            raise RuntimeError("out of resource: shared memory\nmore")
        return [X]

    entry = tuning.tune(fake(run), CPU)
    assert entry["winner"] == WRONG.text
    assert entry["candidates"][WIDE.text] == {"error": "out of resource: shared memory"}


def test_measuring_takes_every_repetition():
    calls = []
    assert len(tuning.milliseconds(lambda: calls.append(1), CPU, repeats=5)) == 5
    assert len(calls) == 8


# The record.


@pytest.fixture
def record(tmp_path):
    """A record of two kernels of one family, as `autotune` writes it on a GPU."""
    one = lambda config: {"winner": config.text, "default": SMALL.text, "candidates": {}}
    choices = {"fake/D4-F8/forward": one(WIDE), "fake/D4-F8/backward": one(SMALL)}
    kernels = {"code": kernel_code(), "choices": choices}
    path = tmp_path / "autotune.json"
    write_json(path, {"choices": {}, "device": DEVICE, "kernels": kernels})
    return path


def test_launchers_get_what_was_recorded(record):
    kernels = Kernels(configs=kernel_configs(str(record), DEVICE))
    configs = kernels.configs_of("fake", F=8, D=4)
    assert config_of(configs, "forward") == WIDE and config_of(configs, "backward") == SMALL
    assert config_of(configs, "other") is None and kernels.configs_of("fake", F=9, D=4) == ""
    assert config_of("", "forward") is None


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"device": DEVICE | {"name": "NVIDIA H200"}},
            "measured on NVIDIA H200, this is NVIDIA",
        ),
        ({"device": {}}, "measured on None, this is NVIDIA GB10"),
        ({"kernels": {"code": "0", "choices": {}}}, "other code of the kernels"),
        ({"kernels": {"code": kernel_code(), "choices": {"a/b/c": {}}}}, "damaged"),
        ({"kernels": {"code": kernel_code(), "choices": {"a/b/c": {"winner": "x"}}}}, "damaged"),
        ({"kernels": {"code": kernel_code(), "choices": [1]}}, "damaged"),
    ],
)
def test_a_foreign_or_damaged_record_is_refused(record, change, reason):
    write_json(record, json.loads(record.read_text()) | change)
    with pytest.raises(UserError, match=reason) as caught:
        kernel_configs(str(record), DEVICE)
    assert "sparkgpt autotune" in str(caught.value) and "\n" not in str(caught.value)


def test_the_code_is_that_of_the_measured_kernels(monkeypatch):
    """An edit that leaves `autotune` up to date must not make training refuse its record."""
    before, read = kernel_code(), Path.read_bytes

    def edited(module):
        added = lambda path: read(path) + b"#" * (path.name == f"{module}.py")
        monkeypatch.setattr(Path, "read_bytes", added)
        return kernel_code()

    for module in ("grouped", "swiglu", "attention_keys", "attention_tiles", "specimen"):
        assert edited(module) != before
    for module in ("compiled", "dispatch", "newton_schulz", "cross_entropy"):
        assert edited(module) == before


def test_building_a_model_reads_it(record, monkeypatch):
    ranks = Ranks(0, 1, CPU)
    train = TrainConfig(autotune=str(record), attention_backend="sdpa")
    config = ModelConfig(model_layers=1, model_dim=8, head_dim=4, intermediate_size=8)
    with pytest.raises(UserError, match="measured on NVIDIA GB10, this is cpu"):
        build_model(config, train, ranks)
    monkeypatch.setattr("sparkgpt.train.build.device_state", lambda device: DEVICE)
    model, _ = build_model(config, train, ranks)
    assert config_of(model.kernels.configs_of("fake", D=4, F=8), "forward") == WIDE


def test_ranks_with_other_records_are_refused(record, monkeypatch):
    train = TrainConfig(autotune=str(record))
    plan = type("Plan", (), {"fingerprint": {}, "steps": 1})
    other = lambda mine, ranks: [mine, mine | {"autotune": "another"}]
    monkeypatch.setattr("sparkgpt.train.run.gather_objects", other)
    with pytest.raises(UserError, match="rank 1 differs from rank 0: .*autotune"):
        check_agreement(train, plan, Ranks(0, 2, CPU))


def test_nothing_is_measured_on_a_cpu_nor_recorded():
    assert autotune.tune_kernels([ModelConfig()], CPU, 64) == {}


def test_on_a_gpu_each_kernel_is_recorded_once(monkeypatch, clock):
    measured = SimpleNamespace(of_model=lambda *_: [fake(lambda c: [X])])
    monkeypatch.setitem(sys.modules, "sparkgpt.ops.tunables", measured)
    models = [ModelConfig(), ModelConfig(model_layers=2)]
    found = autotune.tune_kernels(models, torch.device("cuda"), 64)["kernels"]
    assert found["code"] == kernel_code()
    assert {key: choice["winner"] for key, choice in found["choices"].items()} == {
        "fake/D4-F8/forward": WIDE.text
    }


@pytest.mark.parametrize("flag,chosen", [(None, True), (True, True), (False, False)])
def test_a_flag_outranks_the_recorded_attention(flag, chosen, tmp_path):
    pytest.importorskip("triton")
    path, key = tmp_path / "autotune.json", attention_key(4, 2, 128)
    write_json(path, {"device": DEVICE, "choices": {key: {"winner": "triton"}}})
    train = TrainConfig(autotune=str(path), triton_attention=flag)
    backend = attention_backend(ModelConfig(), train, torch.device("cuda"))
    assert (backend == "triton") == chosen

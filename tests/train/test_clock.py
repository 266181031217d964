"""Rates on a device that runs ahead of the host, where only reading a value waits for it."""

import json
import time

import pytest
from helpers.runs import flags

from sparkgpt.train import loop
from sparkgpt.train.__main__ import main as train
from sparkgpt.train.state import RunState
from sparkgpt.train.step import StepResult


class Device:
    """An imitated queue: a step takes one second, a quarter of it, the update, still queued when
    the step's figures are read; it is paid when somebody waits next."""

    def __init__(self):
        self.now, self.queued = 0.0, 0.0

    def wait(self, *arguments):
        self.now += self.queued
        self.queued = 0.0

    def step(self, *arguments):
        self.wait()
        self.now, self.queued = self.now + 0.75, 0.25
        return StepResult(5.0, None, 0, None, None)

    def evaluate(self, model, windows):
        self.wait()
        self.now += 30  # a validation's own time must not count
        return {"nats_sum": 5.0}


def test_queued_steps_are_booked_where_they_were_made(tmp_path, monkeypatch):
    device = Device()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(loop, "train_step", device.step)
    monkeypatch.setattr(loop, "synchronize", device.wait)
    monkeypatch.setattr(loop, "evaluate", device.evaluate)
    size = ["--target-tokens", "100000", "--log-every", "50", "--no-hf-export"]
    assert train(flags(tmp_path, "clock-s0", *size)) == 0
    summary = json.loads((tmp_path / "runs" / "clock-s0" / "summary.json").read_text())
    assert summary["train_seconds"] == summary["steps"]
    assert summary["window_tokens_per_second"] == pytest.approx(1024)


def test_a_longer_run_has_its_own_second_half():
    state = RunState()
    state.aim(8)
    state.second_half.add(seconds=1.0, window_tokens=100, real_tokens=100, flops=0.0)
    state.aim(8)  # a resume of the same run
    assert state.half == 4 and state.second_half.window_tokens == 100
    state.aim(24)  # an extension: what was the end is now its first half
    assert state.half == 12 and state.second_half.window_tokens == 0

"""Rates on a device that runs ahead of the host, where only reading a value waits for it."""

import json
import time
from types import SimpleNamespace

import pytest
from helpers.runs import flags

from sparkgpt.train import loop
from sparkgpt.train.__main__ import main as train


class Device:
    """An imitated queue: each step takes one second, paid when somebody reads a value."""

    def __init__(self):
        self.now, self.queued = 0.0, 0

    def item(self):
        self.now += self.queued
        self.queued = 0
        return 5.0

    def step(self, *arguments):
        self.queued += 1
        return SimpleNamespace(loss=self, stops=None, aux_loss=None, router=None)

    def evaluate(self, model, windows):
        self.item()
        self.now += 30  # a validation's own time must not count
        return {"nats_sum": 5.0}


def test_queued_steps_are_booked_where_they_were_made(tmp_path, monkeypatch):
    device = Device()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(loop, "train_step", device.step)
    monkeypatch.setattr(loop, "evaluate", device.evaluate)
    size = ["--target-tokens", "100000", "--log-every", "50", "--no-hf-export"]
    assert train(flags(tmp_path, "clock-s0", *size)) == 0
    summary = json.loads((tmp_path / "runs" / "clock-s0" / "summary.json").read_text())
    assert summary["train_seconds"] == summary["steps"]
    assert summary["window_tokens_per_second"] == pytest.approx(1024)

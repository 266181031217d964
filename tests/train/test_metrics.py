"""Clocks, rates, the metrics file, and wandb without a network."""

import json
import time

import pytest
from helpers.runs import flags

from sparkgpt.config import TrainConfig
from sparkgpt.metrics import (
    MetricsFile,
    Throughput,
    TrainingClock,
    WandbRun,
    cut_metrics,
    read_metrics,
)
from sparkgpt.train.__main__ import main as train


def test_rates_are_sums_over_seconds():
    throughput = Throughput()
    throughput.add(seconds=2.0, window_tokens=1000, real_tokens=900, flops=3e12)
    throughput.add(seconds=3.0, window_tokens=1000, real_tokens=600, flops=2e12)
    assert throughput.rates() == {
        "window_tokens_per_second": 400,
        "real_tokens_per_second": 300,
        "tflops_per_second": 1.0,
        "utilization": 0.75,
    }


def test_the_clock_counts_its_intervals_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = TrainingClock(10.0)  # an earlier attempt's seconds
    clock.start()
    now[0] = 2.0
    assert clock.stop() == 2.0
    now[0] = 100.0  # a validation
    clock.start()
    now[0] = 103.0
    assert clock.stop() == 3.0 and clock.seconds == 15.0


def test_lines_past_a_checkpoint_and_torn_ones_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (1, 2, 3):
        metrics.write({"step": step})
    metrics.close()
    path.write_text(path.read_text() + '{"step": 4, "tra')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    cut_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_wandb_offline_writes_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    arguments = flags(tmp_path, "logged-s0", "--max-train-steps", "3", "--no-hf-export", "--wandb")
    assert train([*arguments, "--wandb-tags", "one, two"]) == 0
    run = tmp_path / "runs" / "logged-s0"
    assert list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_hang_at_finish_is_bounded(monkeypatch):
    class Hanging:
        def finish(self):
            time.sleep(60)

    monkeypatch.setattr("sparkgpt.metrics.WANDB_FINISH_SECONDS", 0.2)
    run = WandbRun.__new__(WandbRun)
    run.run = Hanging()
    start = time.monotonic()
    run.finish()
    assert time.monotonic() - start < 5


def test_order_seed_follows_the_seed_unless_given():
    assert TrainConfig(seed=3).order_seed == 3
    assert TrainConfig(seed=3, data_seed=0).order_seed == 0

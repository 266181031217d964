"""Faults of a run: a NaN that stays or is missed, and tokens per second by the wrong clock."""

import json
import time

import pytest
import torch
from fault_tools import ALONE
from helpers.runs import flags
from safetensors.torch import load_file

from sparkgpt.cli import main as cli
from sparkgpt.flags import parse_train
from sparkgpt.model.cost import step_flops
from sparkgpt.optim.schedule import lr_factor
from sparkgpt.train import loop
from sparkgpt.train.__main__ import main as train
from sparkgpt.train.build import build_model
from sparkgpt.train.plan import make_plan
from sparkgpt.train.step import window_loss

NAN = float("nan")
STEPS = 12
GAIN, TABLE = "norm.weight", "embed_tokens.weight"
EVERY = ("--log-every", "1", "--save-every", "1", "--keep-last", "99", "--no-hf-export",
         "--max-train-steps", str(STEPS))  # fmt: skip


def spoil_last(gradient):
    """One NaN, in the last element of one parameter's gradient."""
    spoiled = gradient.clone()
    spoiled.view(-1)[-1] = NAN
    return spoiled


def spoil(monkeypatch, bad):
    """Make steps bad: {step: 'loss', 'loss alone', or a parameter whose gradient gets a NaN}."""
    step, hooks = 0, []

    def spoiled(model, window):
        nonlocal step
        step += 1
        while hooks:
            hooks.pop().remove()
        nats, router = window_loss(model, window)
        what = bad.get(step)
        if what in (GAIN, TABLE):
            hooks.append(model.get_parameter(what).register_hook(spoil_last))
        if what == "loss":
            nats = nats * NAN
        elif what == "loss alone":  # the gradients are those of a good step
            nats = nats + NAN
        return nats, router

    monkeypatch.setattr(loop, "build_loss", lambda *arguments: spoiled)


def reference(arguments, left_out):
    """Weights after STEPS steps of which some are left out, by a loop of our own."""
    config, settings = parse_train(arguments)
    plan = make_plan(config, settings, 1)
    model, optimizer = build_model(config, settings, ALONE)
    for step in range(STEPS):
        if step + 1 not in left_out:
            (window,) = plan.step_windows(step, 0, 1)
            (window_loss(model, window)[0] / window.real_tokens).backward()
            shares = (settings.warmup_frac, settings.lr_decay_factor)
            optimizer.step(lr_factor(step, plan.schedule_steps, *shares))
            model.zero_grad(set_to_none=True)
    return model.state_dict()


def finite(text):
    """JSON without NaN or infinity."""

    def refuse(word):
        raise AssertionError(f"{word} in {text[:200]}")

    return json.loads(text, parse_constant=refuse)


BAD = {
    "the first": {1: "loss"},
    "the first, in a gradient": {1: GAIN},
    "in mid-run": {7: "loss"},
    "in the loss alone": {2: "loss alone", 9: "loss alone"},
    "in one element of a gradient": {7: TABLE},
    "three in a row": {1: "loss", 2: GAIN, 3: "loss"},
    "three in a row, twice": {3: TABLE, 4: "loss", 5: "loss", 7: "loss", 8: GAIN, 9: "loss"},
}


@pytest.mark.parametrize("name", BAD)
def test_fault_16_a_nan_changes_nothing_and_the_next_step_goes_on(tmp_path, monkeypatch, name):
    bad = BAD[name]
    arguments = flags(tmp_path, "bad-s0", *EVERY)
    spoil(monkeypatch, bad)
    assert train(arguments) == 0
    run = tmp_path / "runs" / "bad-s0"
    saved = {n: [(run / f"step{n}" / f"{part}.safetensors").read_bytes()
                 for part in ("model", "optimizer")] for n in range(1, STEPS + 1)}  # fmt: skip
    for step in range(2, STEPS + 1):
        assert (saved[step] == saved[step - 1]) == (step in bad), step
        if step not in bad:
            assert saved[step][0] != saved[step - 1][0] and saved[step][1] != saved[step - 1][1]
    last = load_file(run / f"step{STEPS}" / "model.safetensors")
    for key, value in reference(arguments, bad).items():
        assert torch.equal(last[key], value), key
    lines = [finite(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = {kind: [x["step"] for x in lines if x["kind"] == kind] for kind in ("train", "skip")}
    assert kinds["skip"] == list(bad)
    assert kinds["train"] == [step for step in range(1, STEPS + 1) if step not in bad]
    for step in saved:
        state = finite((run / f"step{step}" / "state.json").read_text())
        assert [x["step"] for x in state["guard"]["skipped"]] == [n for n in bad if n <= step]
    assert state["guard"]["in_a_row"] == 0


@pytest.mark.parametrize("first", [1, 6])
def test_fault_16_the_fourth_in_a_row_ends_the_run(tmp_path, monkeypatch, capsys, first):
    spoil(monkeypatch, dict.fromkeys(range(first, first + 4), "loss"))
    assert cli(["train", *flags(tmp_path, "bad-s0", *EVERY)]) == 1
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("sparkgpt: error: ")]
    assert len(errors) == 1 and f"step {first + 3}" in errors[0] and "document" in errors[0]
    run = tmp_path / "runs" / "bad-s0"
    assert not (run / "run.json").exists() and (run / f"step{first + 2}").exists()
    for part in ("model", "optimizer"):
        for value in load_file(run / f"step{first + 2}" / f"{part}.safetensors").values():
            assert value.isfinite().all()


class Crash(Exception):
    """What ends a process in the middle of a step."""


def test_fault_17_rates_are_by_the_seconds_of_steps_alone_over_all_attempts(tmp_path, monkeypatch):
    now, crash = 1000.0, True

    def takes(name, seconds):
        true = getattr(loop, name)

        def slowly(*arguments, **named):
            nonlocal now
            now += seconds
            if name == "train_step" and crash and now > 1200:
                raise Crash  # between step 5, which is saved, and step 10
            return true(*arguments, **named)

        monkeypatch.setattr(loop, name, slowly)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for name, seconds in {"train_step": 0.5, "evaluate": 30, "save_step": 7}.items():
        takes(name, seconds)
    arguments = flags(tmp_path, "clock-s0", "--save-every", "5", "--no-hf-export", "--resume")
    config, settings = parse_train(arguments)
    plan = make_plan(config, settings, 1)
    with pytest.raises(Crash):
        train(arguments)
    now, crash = now + 86_400, False  # until somebody resumes it
    assert train(arguments) == 0
    run = tmp_path / "runs" / "clock-s0"
    summary, record = (json.loads((run / f"{x}.json").read_text()) for x in ("summary", "run"))
    assert record["attempts"][-1]["from_step"] == 5, "steps made twice must count once"
    half = range(plan.steps // 2, plan.steps)
    real = sum(plan.step_real_tokens(step) for step in half)
    flops = sum(step_flops(config, plan.step_doc_lengths(step)) for step in half)
    assert summary["train_seconds"] == 0.5 * plan.steps
    assert summary["window_tokens_per_second"] == pytest.approx(1024 / 0.5)
    assert summary["real_tokens_per_second"] == pytest.approx(real / (0.5 * len(half)))
    assert summary["tflops_per_second"] == pytest.approx(flops / (0.5 * len(half)) / 1e12)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {x["step"] for x in lines if x["kind"] == "train"} >= {1, 4, 8, plan.steps}
    for line in lines:
        assert line["seconds"] == 0.5 * line["step"]
        if line["kind"] == "train":
            assert line["window_tokens_per_second"] == pytest.approx(1024 / 0.5)
            expected = line["window_tokens_per_second"] * line["utilization"]
            assert line["real_tokens_per_second"] == pytest.approx(expected)

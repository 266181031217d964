"""Steps that are not finite change nothing, are written down, and end a run when they go on."""

import json

import pytest
import torch
from helpers.runs import flags, weights

from sparkgpt.cli import main as cli
from sparkgpt.files import read_json
from sparkgpt.train import step as step_module
from sparkgpt.train.__main__ import main as train

QUIET = ("--no-hf-export", "--log-every", "1")


@pytest.fixture
def poison(monkeypatch):
    """Call with {calls of train_step, from 1: 'loss' or 'gradient'} to make those steps bad."""
    calls = []

    def use(bad):
        true, window_loss = step_module.train_step, step_module.window_loss
        calls.clear()

        def poisoned(model, window):
            nats, router = window_loss(model, window)
            kind = bad.get(len(calls))
            if kind == "loss":
                return nats * float("inf"), router
            if kind == "gradient":
                nats.register_hook(lambda gradient: gradient * float("nan"))
            return nats, router

        def counted(model, loss_of, *arguments):
            calls.append(1)
            return true(model, poisoned, *arguments)

        monkeypatch.setattr("sparkgpt.train.loop.train_step", counted)

    return use


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_bad_steps_change_nothing_and_enter_no_statistic(tmp_path, poison, monkeypatch):
    bad = {1: "loss", 7: "gradient", 8: "loss", 9: "gradient", 11: "loss"}
    poison(bad)
    assert train(flags(tmp_path, "bad-s0", *QUIET)) == 0
    poison({})
    updates = []

    def only_good(self, factor, true=step_module.HybridOptimizer.step):
        updates.append(1)
        if len(updates) not in bad:
            true(self, factor)

    monkeypatch.setattr(step_module.HybridOptimizer, "step", only_good)
    assert train(flags(tmp_path, "without-s0", *QUIET)) == 0
    run = tmp_path / "runs" / "bad-s0"
    assert weights(run) == weights(tmp_path / "runs" / "without-s0")
    written = lines(run)
    assert [x["step"] for x in written if x["kind"] == "skip"] == list(bad)
    assert not {x["step"] for x in written if x["kind"] == "train"} & bad.keys()
    assert all(x["documents"] for x in written if x["kind"] == "skip")
    summary, record = read_json(run / "summary.json"), read_json(run / "run.json")
    assert summary["skipped_steps"] == 5 and summary["initial_loss"] is None
    reasons = [x["reason"] for x in record["skipped"]]
    assert reasons[0] == "the training loss is inf"
    assert reasons[1] == "the gradient of embed_tokens.weight is not finite"


def test_the_row_goes_on_over_a_resume_and_names_the_last_good_checkpoint(tmp_path, poison, capsys):
    arguments = flags(tmp_path, "row-s0", *QUIET, "--save-every", "1", "--keep-last", "9")
    poison({5: "loss", 6: "gradient"})
    assert train([*arguments, "--max-train-steps", "6"]) == 0
    poison({1: "loss", 2: "gradient"})
    assert cli(["train", *arguments, "--resume"]) == 1
    said = capsys.readouterr().err
    assert "is not finite at step 8, bad step number 4 in a row, in document" in said
    assert "the last good checkpoint is step 3;" in said  # step 4's weights gave step 5's loss
    assert "Traceback" not in said
    poison({})
    assert train([*arguments, "--resume"]) == 0
    assert read_json(tmp_path / "runs" / "row-s0" / "summary.json")["skipped_steps"] == 3


def test_stop_means_at_once(tmp_path, poison, capsys):
    poison({3: "gradient"})
    arguments = flags(tmp_path, "stop-s0", *QUIET, "--on-bad-step", "stop", "--save-every", "1")
    assert cli(["train", *arguments]) == 1
    said = capsys.readouterr().err
    assert "not finite at step 3, in document" in said
    assert "last good checkpoint is step 1;" in said
    assert [x["kind"] for x in lines(tmp_path / "runs" / "stop-s0")][-1] == "skip"


def test_the_largest_gradient_is_finite_as_long_as_all_are(monkeypatch):
    from sparkgpt.guard import largest_gradient

    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    p.grad, q.grad = torch.full((3,), -3e38), torch.zeros(3)  # their squares overflow
    assert largest_gradient([p, q]).item() == pytest.approx(3e38)
    q.grad[1] = float("nan")
    assert largest_gradient([p, q]).isnan()

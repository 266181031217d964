"""Stopped anywhere, a run ends in the bytes of one that was not stopped; so do its ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.processes import wait_for_step
from helpers.runs import MOE, flags, timeless, weights, whole_steps

from sparkgpt.checkpoint import steps_in
from sparkgpt.cli import main as cli
from sparkgpt.files import read_json
from sparkgpt.train.__main__ import main as train
from sparkgpt.train.signals import EXIT_STOPPED, StopRequest

KINDS = {"dense": [], "moe": MOE}


def start(arguments, **env):
    command = [sys.executable, "-m", "sparkgpt.train", *arguments]
    return subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    """(folder, name of the kind, an uninterrupted run of 100 steps)."""
    folder = tmp_path_factory.mktemp(request.param)
    assert train(flags(folder, "whole-s0", *KINDS[request.param], *LONG)) == 0
    return folder, request.param, folder / "runs" / "whole-s0"


LONG = ["--target-tokens", "100000", "--save-every", "10", "--log-every", "3", "--no-hf-export"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_resumed_ends_in_the_same_bytes(whole, number):
    folder, kind, expected = whole
    name = f"killed-{number.name}-s0"
    arguments = flags(folder, name, *KINDS[kind], *LONG, "--resume")
    run = folder / "runs" / name
    for step in (12, 45, 70):
        process = start(arguments)
        wait_for_step(run, step, [process])
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (EXIT_STOPPED if number == signal.SIGTERM else -9)
    assert train(arguments) == 0
    assert weights(run) == weights(expected)
    assert timeless(run) == timeless(expected)
    assert len(read_json(run / "run.json")["attempts"]) >= 2


def test_extending_a_prefix_is_exact(whole):
    folder, kind, expected = whole
    arguments = flags(folder, "prefix-s0", *KINDS[kind], *LONG)
    assert train([*arguments, "--max-train-steps", "30"]) == 0
    run = folder / "runs" / "prefix-s0"
    assert read_json(run / "summary.json")["steps"] == 30
    assert train([*arguments, "--resume"]) == 0
    assert weights(run) == weights(expected)
    last = read_json(run / "summary.json")["steps"]
    assert [step for step, _ in steps_in(run)] == [last, last // 10 * 10, last // 10 * 10 - 10]


def test_fewer_steps_than_were_made_are_refused(whole, capsys):
    folder, kind, expected = whole
    arguments = flags(folder, "whole-s0", *KINDS[kind], *LONG, "--resume")
    before = weights(expected)
    assert cli(["train", *arguments, "--max-train-steps", "6"]) == 2
    assert "holds a complete run of" in capsys.readouterr().err
    assert weights(expected) == before


def test_a_finished_run_still_gives_its_weights_when_asked(whole):
    folder, kind, expected = whole
    arguments = [x for x in flags(folder, "late-s0", *KINDS[kind], *LONG) if x != "--save-final"]
    run = folder / "runs" / "late-s0"
    assert train(arguments) == 0 and not (run / "model_final.safetensors").exists()
    assert train([*arguments, "--resume", "--save-final"]) == 0
    assert weights(run) == weights(expected)


def test_a_damaged_checkpoint_is_passed_over(whole, capsys):
    folder, kind, expected = whole
    arguments = flags(folder, "damaged-s0", *KINDS[kind], *LONG)
    assert train([*arguments, "--max-train-steps", "40"]) == 0
    run = folder / "runs" / "damaged-s0"
    for damage in ("cut", "emptied manifest", "cut"):
        newest = run / "step40" / "optimizer.safetensors"
        if damage == "cut":
            newest.write_bytes(newest.read_bytes()[:-1])
        else:
            (run / "step40" / "manifest.json").write_text('{"sha256": {}}')
        assert whole_steps(run) == {20, 30}
        (run / "run.json").unlink()
        assert train([*arguments, "--resume", "--max-train-steps", "40"]) == 0
        assert "step40: damaged" in capsys.readouterr().err
    assert train([*arguments, "--resume"]) == 0
    assert weights(run) == weights(expected)
    assert not list(run.glob(".*step*"))


def test_a_second_writer_is_refused_and_the_pipeline_adopts(whole, tmp_path, capsys):
    folder, kind, expected = whole
    arguments = flags(folder, "busy-s0", *KINDS[kind], *LONG, "--resume")
    process = start(arguments)
    wait_for_step(folder / "runs" / "busy-s0", 5, [process])
    process.send_signal(signal.SIGSTOP)  # a slow one, that holds its lock meanwhile
    second = start(arguments)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 1 and f"process {process.pid}" in said
    # The pipeline's start waits for it, then takes what it finished.
    published = tmp_path / "published"
    threading.Timer(2.0, process.send_signal, [signal.SIGCONT]).start()
    assert train([*arguments, "--publish", str(published)]) == 0
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "waiting" in capsys.readouterr().err
    assert weights(published) == weights(expected)
    assert read_json(published / "run.json")["attempts"][-1]["end"] == "complete"


def test_a_run_stopped_by_rule_is_not_retried(tmp_path):
    arguments = flags(tmp_path, "run-s0", "--tokens-per-batch", "100", "--publish",
                      str(tmp_path / "published"))  # fmt: skip
    said = []
    for attempt in ("1", "2"):
        process = start([*arguments, "--attempt", attempt])
        said.append(process.communicate(timeout=60)[0])
        assert process.returncode == 2
    assert "--tokens-per-batch 100" in said[0]
    assert "not tried again" in said[1] and "--tokens-per-batch 100" in said[1]


def test_a_signal_that_comes_twice_is_one_request():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may have it ignored
    request = StopRequest()
    try:
        for _ in range(2):  # a scheduler's own, and the launcher's
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        request.restore()
        signal.signal(signal.SIGINT, before)

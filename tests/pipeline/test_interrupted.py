"""A training run of the pipeline, stopped or killed: one plain start later its weights are there.

Nothing is asked of the user, and no two processes ever write one run.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import Project, documents_source

RUN = "results/tiny/runs/dense-s0"
TARGET = "results/tiny/jobs/train-dense-s0.json"
STOP_AT = 12  # steps; the run has about 70


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkout in which the run went through undisturbed; `weights` is the digest it gave."""
    project = Project(tmp_path_factory.mktemp("interrupted"))
    documents_source(project, train={"target-tokens": 130_000, "save-every": 5, "log-every": 1})
    project.run(TARGET)
    project.weights = record(project)["weights_sha256"]
    return project


def record(project):
    return json.loads((project.root / RUN / "run.json").read_text())


def forget(project):
    """As if the run had never been started; data and all else stay."""
    for path in [*(project.root / RUN).iterdir(), project.root / TARGET]:
        path.unlink()
    for path in sorted((project.root / "results/tiny/work").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def start(project):
    """Start the pipeline in a session of its own, as a terminal would."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", TARGET]
    command += ["--config", "profile=tiny"]
    log = open(project.root / "start.log", "w")
    return subprocess.Popen(
        command, cwd=project.root, start_new_session=True, stdout=log, stderr=log
    )


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("timed out")


def trainer(project):
    """The pid of the process that trains, once it is STOP_AT steps on; the lock names it."""

    def found():
        for metrics in project.root.glob("results/tiny/work/*/dense-s0/metrics.jsonl"):
            if metrics.read_bytes().count(b'"kind": "train"') >= STOP_AT:
                return int((metrics.parent / ".lock").read_text())
        return None

    return wait_for(found)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    return status != "Z"


def terminate(snakemake, training):
    """What a batch system sends: Snakemake waits for its job, which runs to its end."""
    snakemake.send_signal(signal.SIGTERM)
    snakemake.wait(timeout=60)


def interrupt(snakemake, training):
    """Ctrl-C reaches the whole session: the trainer saves and stops."""
    os.killpg(snakemake.pid, signal.SIGINT)
    snakemake.wait(timeout=60)
    wait_for(lambda: not is_alive(training))


def kill_snakemake(snakemake, training):
    """The trainer survives; the next start waits for it."""
    snakemake.kill()
    snakemake.wait(timeout=60)
    assert is_alive(training)


def kill_trainer(snakemake, training):
    """Snakemake tries again by itself."""
    os.kill(training, signal.SIGKILL)
    assert snakemake.wait(timeout=120) == 0


def kill_both(snakemake, training):
    os.killpg(snakemake.pid, signal.SIGKILL)
    snakemake.wait(timeout=60)
    wait_for(lambda: not is_alive(training))


ENDINGS = {
    terminate: ["complete"],
    interrupt: ["stopped by SIGINT", "complete"],
    kill_snakemake: ["complete"],
    kill_trainer: ["saved", "complete"],
    kill_both: ["saved", "complete"],
}


@pytest.mark.parametrize("stop", ENDINGS, ids=lambda stop: stop.__name__)
def test_one_plain_start_completes_the_run(stop, trained):
    forget(trained)
    snakemake = start(trained)
    try:
        stop(snakemake, trainer(trained))
        code, output = trained.snakemake("--cores", "2", TARGET)
    finally:
        if snakemake.poll() is None:
            os.killpg(snakemake.pid, signal.SIGKILL)
    assert code == 0, output
    found = record(trained)
    assert found["weights_sha256"] == trained.weights
    attempts = found["attempts"]
    assert len(attempts) == len(ENDINGS[stop]), attempts
    # Each attempt goes on from a step that an earlier one saved: never two writers.
    for before, after in zip(attempts, attempts[1:], strict=False):
        assert before["from_step"] < after["from_step"] <= before["to_step"]
    lines = (trained.root / RUN / "metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


def test_accept_lets_a_stopped_run_go_on(trained):
    """An edit that alters no result, while a run is stopped: its checkpoints stay of use."""
    forget(trained)
    snakemake = start(trained)
    interrupt(snakemake, trainer(trained))
    trained.edit("sparkgpt/train/step.py")
    code, output, error = trained.sparkgpt("accept", "--profile", "tiny", "--reason", "a comment")
    assert code == 0 and "train-dense-s0: code: " in output, error
    trained.run(TARGET)
    found = record(trained)
    assert found["weights_sha256"] == trained.weights and len(found["attempts"]) == 2
    assert found["code"]["train"] != found["arguments"]["code_as"]

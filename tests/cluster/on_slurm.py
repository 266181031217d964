"""The smoke pipeline on a SLURM cluster, with two ranks on two nodes, ends as on one machine.

Not part of `make test`: `make test-cluster` brings what it needs.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import slurm
import yaml
from helpers.runs import timeless

from sparkgpt.checkpoint import steps_in
from sparkgpt.fingerprint import ROOT

PARTS = ("Snakefile", "profiles", "requirements", "sparkgpt", "workflow")
RUNS = ("dense-s0", "moe-s0")
# `smoke`, but with runs long enough to be met in the middle.
LONGER = {"target-tokens": 240000, "save-every": 10, "log-every": 1}
CONFIG = ("--config", "profile=longer", "ranks=2")
ON_SLURM = (
    "--profile", "profiles/slurm", *CONFIG, "nodes=2",
    "--slurm-init-seconds-before-status-checks", "12",
    "--default-resources", "runtime=10", "mem_mb=1500",
    "--set-threads", "train=1", "autotune=1", "coordinates=1",
    "--set-resources", "train:gpu=2", "train:slurm_extra='--signal=TERM@60'",
)  # fmt: skip
SECONDS = 240


def checkout(root: Path) -> Path:
    """A copy of this checkout with the profile `longer`."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        copy(ROOT / part, root / part)
    config = root / "workflow" / "config"
    smoke = yaml.safe_load((config / "smoke.yaml").read_text())
    (config / "longer.yaml").write_text(yaml.safe_dump(smoke | {"train": smoke["train"] | LONGER}))
    shutil.copyfile(config / "smoke.runs.tsv", config / "longer.runs.tsv")
    return root


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm.") as folder, slurm.started(Path(folder)) as it:
        yield it


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A checkout whose runs are being trained on this machine, while SLURM's jobs wait a lot."""
    root = checkout(tmp_path_factory.mktemp("here"))
    targets = [f"results/longer/runs/{run}/run.json" for run in RUNS]
    with pipeline(root, *targets, "--cores", "2", *CONFIG) as process:
        yield root, process


@pytest.fixture(scope="module")
def on_slurm(cluster, here, tmp_path_factory):
    """The checkout after its pipeline ran on the cluster: {"root": ..., what happened: (run, job)}.

    The run that starts first is told to end, as at the end of its time, and later cancelled; the
    other loses a node.
    """
    root = checkout(tmp_path_factory.mktemp("slurm"))
    with pipeline(root, *ON_SLURM, env=cluster.environment) as process:
        happened = {"root": root} | disturb(cluster, root, process)
        assert process.wait(SECONDS) == 0, (root / "snakemake.log").read_text()
    return happened


@pytest.fixture(scope="module")
def on_one_machine(here):
    """The checkout after the same runs by torchrun, here, undisturbed."""
    root, process = here
    assert process.wait(SECONDS) == 0, (root / "snakemake.log").read_text()
    return root


def test_pipeline_reaches_its_tables(on_slurm):
    assert "Dense" in (on_slurm["root"] / "results/longer/tables.md").read_text()


def test_run_told_to_end_or_cancelled_goes_on_in_a_new_job(cluster, on_slurm):
    run, told = on_slurm["told"]
    _, cancelled = on_slurm["cancelled"]
    jobs = {job: state for job, said, state in job_lines(cluster) if is_of(run, said)}
    assert jobs.pop(told) == "FAILED" and jobs.pop(cancelled) == "CANCELLED"
    assert list(jobs.values()) == ["COMPLETED"]
    attempts = attempts_of(on_slurm["root"], run)
    assert len(attempts) == 3 and all_in_one(attempts)
    for stopped in attempts[:2]:
        assert stopped["end"] in ("SIGTERM", "another rank's signal")


def test_run_that_lost_a_node_is_requeued_and_goes_on(cluster, on_slurm):
    run, job = on_slurm["lost"]
    shown = cluster("scontrol", "show", "job", job)
    assert "JobState=COMPLETED" in shown and "Restarts=1" in shown
    attempts = attempts_of(on_slurm["root"], run)
    assert len(attempts) == 2 and all_in_one(attempts)


@pytest.mark.parametrize("run", RUNS)
def test_ends_as_torchrun_does_here(on_slurm, on_one_machine, run):
    ours, theirs = (
        root / "results/longer/runs" / run for root in (on_slurm["root"], on_one_machine)
    )
    digests = [
        hashlib.sha256((folder / "model_final.safetensors").read_bytes()).hexdigest()
        for folder in (ours, theirs)
    ]
    assert digests[0] == digests[1]
    assert timeless(ours) == timeless(theirs)  # each step once, each loss to the last bit
    for folder in (ours, theirs):
        assert json.loads((folder / "summary.json").read_text())["world_size"] == 2


@contextmanager
def pipeline(root: Path, *arguments: str, env=None):
    """Snakemake in a checkout, as a process that ends with the context."""
    with open(root / "snakemake.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=root, env=env, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:  # asked to end, it would wait for a cluster that is going
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def disturb(cluster, root: Path, process: subprocess.Popen) -> dict[str, tuple[str, str]]:
    """Do all three to the runs, each once both ranks have saved anew: {what: (run, job)}."""
    deadline = time.monotonic() + SECONDS

    def wait_until(condition):
        while not (found := condition()):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(told_by(cluster, root))
            time.sleep(0.05)
        return found

    first = wait_until(lambda: next((run for run in RUNS if saved_steps(root, run)), None))
    told = job_of(cluster, first)
    cluster("scancel", "--signal=TERM", told)

    [second] = set(RUNS) - {first}
    wait_until(lambda: saved_steps(root, second))
    lost = job_of(cluster, second)
    cluster("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    # A node that is back while a process of the job still ends there would refuse the job's next
    # start as a duplicate, and be drained.
    wait_until(lambda: state_of(cluster, lost) == "PENDING" and not steps_running(lost))
    cluster("scontrol", "update", "NodeName=node2", "State=RESUME")
    cluster("scontrol", "update", f"JobId={lost}", "StartTime=now")  # SLURM would wait a while

    stopped = max(saved_steps(root, first))
    wait_until(lambda: max(saved_steps(root, first)) > stopped)
    cancelled = job_of(cluster, first)
    cluster("scancel", cancelled)
    return {"told": (first, told), "lost": (second, lost), "cancelled": (first, cancelled)}


def told_by(cluster, root: Path) -> str:
    """What is known when the runs don't go on: Snakemake's log, then SLURM's, nodes and jobs."""
    queue = cluster("squeue", "--states=all", "--sort=i", "--format=%i %T %r %S %N %k")
    nodes = cluster("sinfo", "--Node", "--format=%N %T %E")
    return "\n".join(((root / "snakemake.log").read_text(), cluster.log(), nodes, queue))


def saved_steps(root: Path, run: str) -> set[int]:
    """Steps whose checkpoint both ranks of a run have."""
    folders = root.glob(f"results/longer/work/*/{run}")
    steps = lambda folder: {step for step, _ in steps_in(folder)}
    return set().union(*(steps(folder) & steps(folder / "rank1") for folder in folders))


def job_lines(cluster) -> list[list[str]]:
    """Number, comment and state of each job, oldest first."""
    said = cluster("squeue", "--noheader", "--states=all", "--sort=i", "--format=%i|%k|%T")
    return [line.split("|") for line in said.splitlines()]


def job_of(cluster, run: str) -> str:
    """The running job of a run."""
    lines = job_lines(cluster)
    [job] = [number for number, said, state in lines if is_of(run, said) and state == "RUNNING"]
    return job


def is_of(run: str, comment: str) -> bool:
    """Whether a job's comment, the plugin's, names the training of a run."""
    return comment.startswith("rule_train_") and comment.endswith(run)


def state_of(cluster, job: str) -> str:
    return {number: state for number, _, state in job_lines(cluster)}[job]


def steps_running(job: str) -> bool:
    """Whether a process of SLURM's still looks after a job, on either node."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if (folder / "cmdline").read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                return True
    return False


def attempts_of(root: Path, run: str) -> list[dict]:
    return json.loads((root / "results/longer/runs" / run / "run.json").read_text())["attempts"]


def all_in_one(attempts: list[dict]) -> bool:
    """Whether each attempt began, past the start, where the one before it had stopped."""
    pairs = zip(attempts, attempts[1:], strict=False)
    return all(0 < a["to_step"] == b["from_step"] < b["to_step"] for a, b in pairs)

"""A copy of this tree, starts of its pipeline, and the processes that such a start leaves."""

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil
from attempt import Fault, is_alive

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "README.md", "profiles", "requirements", "sparkgpt", "workflow")
COMMAND = (sys.executable, "-m", "snakemake", "--cores", "all", "--config", "profile=smoke")
PATIENCE = 300.0  # seconds for anything that a sound start does
POLL = 0.02
JOB = re.compile(r"record \S+/jobs/(\S+)\.json --values")  # ends the shell text of each rule
STAGE_OF = {
    **dict.fromkeys(("fetch", "verify", "prepare", "cache", "ready"), "data"),
    "autotune": "autotune",
    **dict.fromkeys(("export", "check_hf", "check_mlx"), "checks"),
    **dict.fromkeys(("compare", "tables", "plot", "rulegraph", "page"), "report"),
}
RUNS = ("dense", "moe")  # each a stage of its own
PLACES = ("data", "autotune", "training starts", "training steps", "checks", "report", "between")
# Run by each Python process of the tree: a trainer notes what it writes, and where.
SPY = """
import os, sys, time
if "sparkgpt.train" in sys.orig_argv:
    ledger = os.open({ledger!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    name = f"{{os.getpid()}}.{{time.time_ns()}}"
    def note(event, arguments):
        written = event in ("os.rename", "os.remove") or (
            event == "open" and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if written and isinstance(arguments[0], (str, os.PathLike)):
            os.write(ledger, f"{{name}} {{os.fspath(arguments[0])}}\\n".encode())
    sys.addaudithook(note)
"""
WRITTEN = re.compile(r"(\S+) \S*results/smoke/(?:work/[^/\s]+|runs)/([^/\s]+)/(?!\.lock)")


@dataclass
class Target:
    """A kill to be made."""

    stage: str
    step: int  # of a run: from which on
    whom: str  # the "job" alone, "snakemake" alone, or "all" that one start runs
    signal: int
    share: float  # of the job's length: until the kill
    after: int  # jobs of the stage, or for "between" kills, that are to be let pass in the round
    job: str = ""  # that was met


class Tree:
    """A copied checkout. `groups` holds the process groups of all its starts; `lengths` the seconds
    that jobs took in the last start that `end` watched: (job, False), and of training only until
    the first step; (job, True) from then on."""

    def __init__(self, root: Path, origin: Path = ROOT):
        self.root, self.results = root, root / "results" / "smoke"
        self.ledger, spy = root / "ledger", root / "spy"
        spy.mkdir(parents=True)
        for part in [*PARTS, *(p.relative_to(origin) for p in origin.glob("results/v*"))]:
            copy = shutil.copytree if (origin / part).is_dir() else shutil.copyfile
            copy(origin / part, root / part)
        (spy / "sitecustomize.py").write_text(SPY.format(ledger=str(self.ledger)))
        self.env = os.environ | {"PYTHONPATH": str(spy)}
        self.groups: set[int] = set()
        self.logs: list[Path] = []
        self.seen: dict[str, set[str]] = defaultdict(set)  # jobs by stage, since `empty`
        self.lengths: dict[tuple[str, bool], float] = {}
        self.seconds = 0.0  # of the last start that `end` saw through

    def lengthen_training(self) -> None:
        """Let a trainer that was left alone be at work when the next one comes: for 121 steps."""
        smoke = self.root / "workflow" / "config" / "smoke.yaml"
        text, changed = re.subn(r"(target-tokens:) 60000\b", r"\1 240000", smoke.read_text())
        if not changed:
            raise Fault(f"{smoke} has other target-tokens than this program knows; adapt it")
        smoke.write_text(text)

    def start(self) -> "Start":
        """The plain command, in a session of its own, as a terminal gives it."""
        return Start(self)

    def call(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command in this tree."""
        done = subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )
        return done.returncode, done.stdout + done.stderr

    def empty(self) -> None:
        """As if nothing had ever run here."""
        for path in (self.results, self.root / ".snakemake"):
            shutil.rmtree(path, ignore_errors=True)
        self.ledger.unlink(missing_ok=True)
        self.seen.clear()

    def members(self) -> Iterator[psutil.Process]:
        """All that lives of all starts, orphans among them."""
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                if os.getpgid(pid) in self.groups and is_alive(process := psutil.Process(pid)):
                    yield process

    def jobs(self) -> dict[str, list[psutil.Process]]:
        """Living jobs by name, each with the shells that run it (orphans, too)."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                command = " ".join(process.cmdline())
                if (match := JOB.search(command)) and "-c" in command.split()[:3]:
                    found.setdefault(match[1], []).append(process)
        for job in found:
            self.seen[stage_of(job)].add(job)
        return found

    def is_trained(self, run: str) -> bool:
        """Whether nothing is left of a run but its record."""
        return (self.results / f"jobs/train-{run}-s0.json").exists()

    def progress(self, run: str, since: float) -> int:
        """The last step in a run's metrics, when they were written after `since` (epoch)."""
        for path in self.results.glob(f"work/*/{run}-s0/metrics.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime > since:
                    steps = re.findall(r'"step": (\d+)', path.read_text())
                    return int(steps[-1]) if steps else 0
        return 0

    def await_orphans(self) -> None:
        """Wait until all processes of all starts have come to their end."""
        until = time.monotonic() + PATIENCE
        while left := [process.pid for process in self.members()]:
            if time.monotonic() > until:
                raise Fault(f"processes {left} go on without Snakemake")
            time.sleep(0.1)

    def two_writers(self) -> list[str]:
        """Runs into which a trainer wrote before and after another one did, a line each."""
        lines = self.ledger.read_text().splitlines()
        notes = [match.groups() for line in lines if (match := WRITTEN.match(line))]
        found = [] if notes else ["no trainer was seen to write anything"]
        for run in sorted({run for _, run in notes}):
            turns = [name for name, _ in groupby(n for n, r in notes if r == run)]
            if again := sorted({name for name in turns if turns.count(name) > 1}):
                found.append(f"{run} had two writers at a time: {', '.join(again)} and another")
        return found

    def close(self) -> None:
        """End whatever still lives."""
        while members := list(self.members()):
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(POLL)


class Start:
    """One start of the pipeline."""

    def __init__(self, tree: Tree):
        self.tree = tree
        log = tree.root / f"start{len(tree.logs) + 1}.log"
        tree.logs.append(log)
        self.began = time.monotonic()
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                COMMAND, cwd=tree.root, env=tree.env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        tree.groups.add(self.process.pid)

    def end(self) -> int:
        """Watch it to its end, and how long its stages take; its exit code."""
        seen: dict[tuple[str, bool], list[float]] = {}
        for jobs in self._watched():
            now = time.monotonic()
            for job, shells in jobs.items():
                seen.setdefault((job, self.step(job, shells) > 0), [now, now])[1] = now
        self.tree.seconds = time.monotonic() - self.began
        self.tree.lengths = {key: last - first for key, (first, last) in seen.items()}
        return self.process.wait()

    def wait_for(self, targets: list[Target]) -> Target | None:
        """The first target whose stage has come; None when the start ended before."""
        for jobs in self._watched():
            for target in targets:
                if self.is_reached(target, jobs):
                    return target
        return None

    def is_reached(self, target: Target, jobs: dict[str, list[psutil.Process]]) -> bool:
        """Whether a job that a target is for lives; the other run's, once its own is over."""
        if target.stage == "between":
            return not jobs
        stages = {target.stage}
        if target.stage in RUNS and self.tree.is_trained(target.stage):
            stages = set(RUNS)
        for job, shells in jobs.items():
            stage = stage_of(job)
            passed = len(self.tree.seen[stage]) > target.after
            if stage in stages and passed and self.step(job, shells) >= target.step:
                target.job = job
                return True
        return False

    def step(self, job: str, shells: list[psutil.Process]) -> int:
        """The step that a living trainer has come to; 0 while it starts, and for other jobs."""
        if stage_of(job) in RUNS:
            with contextlib.suppress(psutil.NoSuchProcess):
                since = min(shell.create_time() for shell in shells)
                return self.tree.progress(stage_of(job), since)
        return 0

    def hit(self, target: Target, rng: random.Random) -> tuple[str, str]:
        """Send the target's signal if its job is still there. The place that it fell into, and
        the jobs that lived then; both empty when the moment has passed."""
        jobs, place = self.tree.jobs(), target.stage
        there = target.job in jobs if target.job else not jobs
        if self.process.poll() is not None or not there:
            return "", ""
        if target.stage in RUNS:
            steps = self.step(target.job, jobs[target.job])
            place = "training steps" if steps else "training starts"
        if target.whom == "all":
            os.killpg(self.process.pid, target.signal)
        elif target.whom == "snakemake":
            self.process.send_signal(target.signal)
        else:
            victims = [p for shell in jobs[target.job] for p in python_below(shell) if is_alive(p)]
            if not victims:
                return "", ""
            rng.choice(victims).send_signal(target.signal)
        return place, ", ".join(sorted(jobs)) or "no job"

    def _watched(self) -> Iterator[dict[str, list[psutil.Process]]]:
        """The living jobs, again and again until the start is over."""
        until = self.began + PATIENCE
        while self.process.poll() is None:
            if time.monotonic() > until:
                raise Fault(f"a start had no end after {PATIENCE:.0f} s")
            yield self.tree.jobs()
            time.sleep(POLL)


def stage_of(job: str) -> str:
    """The stage of a job; of a training job its row of the runs table."""
    rule, _, name = job.partition("-")
    return name.removesuffix("-s0") if rule == "train" else STAGE_OF[rule]


def python_below(shell: psutil.Process) -> list[psutil.Process]:
    """The Python processes of a job's shell; tee is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in shell.children() if "python" in child.name()]
    return []

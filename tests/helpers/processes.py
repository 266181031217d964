"""Ranks as processes of their own: started together, waited for, and never left behind."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TRAINER = (sys.executable, "-m", "sparkgpt.train")
SABOTAGE = (sys.executable, str(Path(__file__).with_name("sabotage.py")))
ROOT = Path(__file__).parents[2]
GONE = "another rank is gone or did not answer within --ddp-timeout-seconds"

Command = tuple[Sequence[str], dict[str, str]]  # what to run, and what it finds in its environment


def rank_commands(flags: Sequence[list[str]], **instead: Sequence[str]) -> list[Command]:
    """A command for each rank's flags; `rank1=[...]` starts that rank by another program."""
    port = str(free_port())
    shared = {"WORLD_SIZE": str(len(flags)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        ([*instead.get(f"rank{rank}", TRAINER), *own], shared | {"RANK": str(rank)})
        for rank, own in enumerate(flags)
    ]


def torchrun(options: str, flags: list[str], program: Sequence[str] = TRAINER) -> Command:
    """A command that starts ranks of a Python program by torch's own launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return [*launcher, *program[1:], *flags], {}


@contextmanager
def started(commands: list[Command]) -> Iterator[list[subprocess.Popen]]:
    """The commands' processes, on this tree's code, with one thread. None outlives the block."""
    shared = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            command, env=shared | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, env in commands
    ]
    try:
        yield processes
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # a launcher forwards only the first
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
            _wait(processes, 5)
        for process in processes:
            process.stdout.close()


def ends(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """(exit code, output) of each process, all of which must end within `seconds`."""
    deadline = time.monotonic() + seconds
    return [
        (process.returncode, output)
        for process in processes
        for output, _ in [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))]
    ]


def run_ranks(flags: Sequence[list[str]], seconds: float = 60, **instead: Sequence[str]):
    """Start ranks and wait for their ends: (exit code, output) of each."""
    with started(rank_commands(flags, **instead)) as processes:
        return ends(processes, seconds)


def wait_for_step(run: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Wait until metrics.jsonl shows a step; no process may end before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if last_step(run) >= step:
            return
        for process in processes:
            assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in {run}")


def last_step(run: Path) -> int:
    """The step of the last whole line of metrics.jsonl, 0 without one."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint's three files have the sha256 of its manifest, computed here."""
    digests = json.loads((checkpoint / "manifest.json").read_text())["sha256"]
    found = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in digests}
    return len(digests) == 3 and found == digests


def errors(output: str) -> list[str]:
    """The lines that tell a user of an error. A traceback would be a fault of its own."""
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("sparkgpt: error: ")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(0.05)

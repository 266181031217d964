"""One start of a run: its processes, what they tell, and their end by SIGKILL."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil

CHILD = str(Path(__file__).with_name("child.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PATIENCE = 120.0  # seconds for anything that a sound run does
DDP_TIMEOUT = 20  # seconds that a rank waits for the other
LEFT_ALONE = DDP_TIMEOUT + 40.0  # torchrun gives a worker 30 s to stop


class Fault(Exception):
    """What a run did wrong, in one line."""


class Attempt:
    """A started run. `told` holds the lines of its processes so far, in order (see child.py)."""

    def __init__(self, ranks: int, flags: list[str], log: Path, held: dict, rng: random.Random):
        self.ranks, self.rng = ranks, rng
        self.told: list[dict] = []
        self.places: dict = defaultdict(lambda: [("start", 0.0)])  # open phases, by rank
        self.lengths: dict = defaultdict(list)  # seconds of ended phases, and of the start
        self.workers: dict[int, psutil.Process] = {}  # of torchrun, by rank
        fifo = log.with_suffix(".fifo")
        os.mkfifo(fifo)
        self.pipe = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # to write, too: so it never ends
        known = {"CRASH_FIFO": str(fifo), "CRASH_HELD": json.dumps(held)}
        command = [sys.executable, *(TORCHRUN if ranks == 2 else ()), CHILD, *flags]
        self.started = time.monotonic()
        with open(log, "w") as file:
            env = environment(log.parent) | known
            self.process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        self.root = psutil.Process(self.process.pid)

    def close(self) -> None:
        """End whatever still runs, and take in the last lines told."""
        family = [self.root, *self._below()]
        self._kill(family)
        self._await_end(family)
        self.read()
        os.close(self.pipe)

    def read(self, seconds: float = 0.0) -> list[dict]:
        """The lines told since the last call, after waiting up to `seconds` for one."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return []
        fresh = [json.loads(line) for line in os.read(self.pipe, 1 << 20).splitlines()]
        self.told += fresh
        for line in fresh:
            self._note(line)
        return fresh

    def _note(self, line: dict) -> None:
        """Keep what a line tells of processes, places and lengths."""
        event, phase, rank, at = line["event"], line["phase"], line["rank"], line["at"]
        places = self.places[rank]
        if event == "start" and self.ranks > 1:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.workers[rank] = psutil.Process(line["pid"])
        elif event == "begin":
            self.lengths["start"].append(at - self.started)
            places[0] = ("between", at)
        elif event == "enter":
            places.append((phase, at))
        elif event == "exit":
            self.lengths[phase].append(at - places.pop()[1])

    def wait_for(self, wanted: Callable[[dict], bool]) -> bool:
        """Wait until a process tells a wanted line; False when the run came to its end first."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            ended = self.process.poll() is not None
            if any(wanted(line) for line in self.read(0.0 if ended else 0.1)):
                return True
            if ended:
                return False
        raise Fault(f"neither at its end nor at the kill after {PATIENCE:.0f} s")

    def end(self) -> int:
        """Let the run come to its end; its exit code."""
        self.wait_for(lambda line: False)
        return self.process.wait()

    def kill_all(self) -> str | None:
        """SIGKILL to the one process, or to torchrun's agent and all below it in any order.

        Like its sisters it returns what there is to tell, or None when the end came first.
        """
        family = [self.root, *self._below()]
        self._kill(family)
        done = "all processes"
        return done if self._await_end(family) == -signal.SIGKILL else None

    def kill_agent(self, delay: float) -> str | None:
        """SIGKILL to the agent alone. Its orphans go on for `delay` seconds, then it's theirs."""
        orphans = self._below()
        self._kill([self.root])
        time.sleep(delay)
        self._kill(orphans)
        done = f"the agent, and its orphans {delay * 1000:.0f} ms later"
        return done if self._await_end([self.root, *orphans]) == -signal.SIGKILL else None

    def kill_worker(self, rank: int) -> str | None:
        """SIGKILL to one rank. Fault unless the agent and the other rank then end by themselves."""
        others, began = self._below(), time.monotonic()
        self._kill([w for r, w in self.workers.items() if r == rank])
        self.process.send_signal(signal.SIGCONT)
        try:
            code = self.process.wait(LEFT_ALONE)
        except subprocess.TimeoutExpired:
            raise Fault(f"still there {LEFT_ALONE:.0f} s after rank {rank} was killed") from None
        if left := [p.pid for p in others if is_alive(p)]:
            raise Fault(f"processes {left} outlived the agent after rank {rank} was killed")
        if code == 0:
            return None
        return f"rank {rank} alone, the others gone {time.monotonic() - began:.1f} s later"

    def place(self, rank: int) -> str:
        """The innermost phase that a rank had begun and not ended, as far as it has told."""
        return self.places[rank][-1][0]

    def step(self, rank: int) -> int:
        """Completed steps of a rank when it told for the last time."""
        return max((line["step"] for line in self.told if line["rank"] == rank), default=0)

    def _below(self) -> list[psutil.Process]:
        """The workers of torchrun's agent. Known without a search once all have told; before that
        the agent is stopped, so that it starts no other."""
        if self.ranks == 1 or len(self.workers) == self.ranks:
            return list(self.workers.values())
        self.process.send_signal(signal.SIGSTOP)
        while self.process.poll() is None:
            if self.root.status() == psutil.STATUS_STOPPED:
                return self.root.children(recursive=True)
            time.sleep(0.0005)
        return []

    def _kill(self, processes: list[psutil.Process]) -> None:
        """SIGKILL to each, in any order."""
        for process in self.rng.sample(processes, len(processes)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _await_end(self, processes: list[psutil.Process]) -> int:
        """Wait until processes that got SIGKILL are gone; the exit code of the root."""
        until = time.monotonic() + PATIENCE
        while any(is_alive(p) for p in processes):
            if time.monotonic() > until:
                raise Fault("a process outlived SIGKILL")
            time.sleep(0.001)
        return self.process.wait()


def environment(temporary: Path) -> dict[str, str]:
    """One thread, no spinning, and temporary files where they are removed."""
    more = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(temporary)}
    return os.environ | more


def is_alive(process: psutil.Process) -> bool:
    """Whether a process can still do anything; a zombie can't."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False

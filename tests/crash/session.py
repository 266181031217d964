"""A session of kills: its runs, from the first start to the comparison, and what it learns."""

import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from attempt import DDP_TIMEOUT, PATIENCE, Attempt, Fault, environment
from compare import attempts_differ, differences
from helpers.runs import MOE, flags
from plan import SAVE_EVERY, STEPS, TRIES, Target, next_run

COLUMNS = ("dense", "moe", "dense x2", "moe x2")  # of the table; x2: two ranks
CADENCE = ["--save-every", str(SAVE_EVERY), "--val-interval-steps", "4", "--max-train-steps",
           str(STEPS), "--resume", "--ddp-timeout-seconds", str(DDP_TIMEOUT)]  # fmt: skip
KINDS = {"dense": ["--log-every", "1"], "moe": ["--log-every", "3", *MOE]}  # 3: not that of saves
FIRST_GUESS = 0.005  # seconds of a phase, before one was seen
SHOWN = 5  # differences in the line that ends a session


class Session:
    """What all runs share: the folder, uninterrupted runs, lengths of phases, places of kills."""

    def __init__(self, folder: Path, kills: int, rng: random.Random):
        self.folder, self.kills, self.rng = folder, kills, rng
        self.hits = self.attempts = self.runs = 0
        self.places: Counter = Counter()  # (place, column) -> kills
        self.lengths: dict = defaultdict(list)  # (column, phase) -> seconds
        self.running = ""  # the run that is being made, and the log of its last attempt
        self.log: Path | None = None

    def carry_out(self, targets: list[Target]) -> None:
        """Make runs until each target was hit. Fault when one can't be, or a run goes wrong."""
        kinds = self.rng.sample(sorted(KINDS), len(KINDS))
        while targets:
            chosen = next_run(targets)
            column = chosen[0].variant
            if column == "ranks":
                column = f"{kinds[0]} x2"
                kinds.reverse()
            targets += Run(self, column).carry_out(chosen)

    def flags(self, name: str, column: str) -> list[str]:
        """Flags of a run; a step of two ranks takes two windows."""
        kind, two = column.removesuffix(" x2"), column.endswith(" x2")
        size = ["--target-tokens", "80000" if two else "40000"]
        places = ["--publish", str(self.folder / "published" / name)]
        return flags(self.folder, name, *KINDS[kind], *size, *CADENCE, *places)

    def uninterrupted(self, column: str) -> Path:
        """The run to compare with, by the plain trainer in one process; made on first use."""
        name = f"whole-{column.replace(' ', '-')}"
        run = self.folder / "runs" / name
        if run.exists():
            return run
        self.running = name
        command = [sys.executable, "-m", "sparkgpt.train", *self.flags(name, column)]
        command += ["--accumulate", "2"] if column.endswith(" x2") else []
        self.log = self.folder / f"{name}.log"
        with open(self.log, "w") as log:
            env = environment(self.folder)
            done = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=PATIENCE)
        if done.returncode:
            raise Fault(f"the uninterrupted run ended with exit code {done.returncode}")
        return run

    def learn(self, column: str, attempt: Attempt) -> None:
        """Keep how long the phases of an attempt lasted."""
        for phase, seconds in attempt.lengths.items():
            self.lengths[column, phase] = (self.lengths[column, phase] + seconds)[-50:]

    def length(self, column: str, phase: str, attempt: Attempt) -> float:
        """Seconds that a phase usually lasts, as far as was seen until now."""
        seen = self.lengths[column, phase] + attempt.lengths[phase]
        return statistics.median(seen[-50:]) if seen else FIRST_GUESS


class Run:
    """One run, started again and again, until it is complete and compared."""

    def __init__(self, session: Session, column: str):
        self.expected = session.uninterrupted(column)
        session.runs += 1
        self.session, self.column = session, column
        self.name = session.running = f"{column.replace(' ', '-')}-{session.runs}"
        self.ranks = 2 if column.endswith(" x2") else 1
        self.flags = session.flags(self.name, column)
        self.folder = session.folder / "runs" / self.name
        self.published = session.folder / "published" / self.name
        self.attempts = session.folder / "attempts" / self.name  # logs and FIFOs
        self.attempts.mkdir(parents=True)
        self.history: list[Attempt] = []

    def carry_out(self, targets: list[Target]) -> list[Target]:
        """Start, kill, start again; then compare. Returns the targets that it did not come to."""
        while not self.start(targets):
            pass
        wrong = differences(self.folder, self.expected, self.published, self.ranks)
        wrong += attempts_differ(self.folder, self.from_steps())
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise Fault("; ".join(wrong[:SHOWN]) + more)
        print(f"{self.name}: equal after {len(self.history)} attempts", flush=True)
        for folder in (self.folder, self.published, self.attempts):
            shutil.rmtree(folder)
        return targets

    def start(self, targets: list[Target]) -> bool:
        """One attempt, killed at the first target, which is taken off when hit; whether the run
        came to its end instead."""
        session, number = self.session, len(self.history) + 1
        target = targets[0] if targets else None
        session.attempts += 1
        session.log = self.attempts / f"{number}.log"
        held = target.held if target else {}
        attempt = Attempt(self.ranks, self.flags, session.log, held, session.rng)
        self.history.append(attempt)
        try:
            killed = self.kill(attempt, target) if target else None
            if killed is None and (code := attempt.end()):
                raise Fault(f"attempt {number} ended with exit code {code}")
        finally:
            attempt.close()
        session.learn(self.column, attempt)
        if target and self.note(attempt, target, killed):
            targets.pop(0)
        return killed is None

    def kill(self, attempt: Attempt, target: Target) -> str | None:
        """SIGKILL where the target says; what there is to tell of it, None when the end came
        first."""
        if not target.is_at_once and not attempt.wait_for(target.awaited()):
            return None
        span = self.span(attempt, target) / 2**target.tries
        first, second = (share * span for share in target.shares)
        time.sleep(first)
        if target.how == "all":
            done = attempt.kill_all()
        elif target.how == "agent":
            done = attempt.kill_agent(second - first)
        else:
            done = attempt.kill_worker(target.rank)
        return done and f"after {first * 1000:.0f} ms: {done}"

    def span(self, attempt: Attempt, target: Target) -> float:
        """Seconds within which a target's kill is to fall."""
        length = lambda phase: self.session.length(self.column, phase, attempt)
        if target.phase == "random":  # to the end: half of the time goes to saves and validations
            return 2 * (STEPS - attempt.step(target.rank)) * length("step")
        return FIRST_GUESS if target.held else length(target.phase)

    def note(self, attempt: Attempt, target: Target, killed: str | None) -> bool:
        """Print a line about a kill, and count it; whether it fell where it was to. Fault when too
        many did not."""
        session = self.session
        if killed:
            place = attempt.place(target.rank)
            session.places[place, self.column] += 1
            where = f"in {place} at step {attempt.step(target.rank)}, {killed}"
        else:
            place, where = "", "complete before a kill"
        hit = bool(killed) and target.phase in ("random", place)
        session.hits += hit
        count = f"kill {session.hits}/{session.kills}" if hit else "    missed:"
        aim = "" if target.phase == place else f" (aimed at {target.phase})"
        print(f"{count} {self.column} {where}{aim}", flush=True)
        target.tries += 1
        if not hit and target.tries == TRIES:
            raise Fault(f"no kill fell into the phase {target.phase!r} in {TRIES} attempts")
        return hit

    def from_steps(self) -> list[int]:
        """The first steps of the attempts that the final weights come from, as run.json should
        list them: an attempt that wrote no checkpoint has left no trace."""
        chains: dict[int, list[int]] = {0: []}  # step of a checkpoint -> attempts that led to it
        final: list[int] = []
        for attempt in self.history:
            chain: list[int] = []
            for line in attempt.told:
                if line["rank"] != 0:
                    continue
                if line["event"] == "begin":
                    chain = [*chains.get(line["step"], []), line["step"]]
                elif line["phase"] == "before rename":
                    chains[line["step"]] = chain
                elif line["phase"] == "record":
                    final = chain
        return final

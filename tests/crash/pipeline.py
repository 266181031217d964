"""Kill trainers, other jobs and Snakemake at random, start it again, and compare the end.

    python tests/crash/pipeline.py [--kills N] [--seed S]

The smoke profile, in a copy of this tree, by one plain command, given again until it succeeds.
A start goes on after a job alone was killed: Snakemake tries trainers again by itself. Exit code 0
when all kills fell where they were aimed at, no two trainers wrote one run at a time, and the
results are those of a start that nobody disturbed; 1 otherwise.
"""

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, for the helpers

from attempt import Fault
from command import carry_out, draw_table
from pipeline_end import differences, left_behind
from pipeline_start import COMMAND, PLACES, RUNS, Start, Target, Tree

WHOM = ("job", "snakemake", "all")
SIGNALS, WEIGHTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (3, 1, 1)
# A round of ten: training most of all.
ROUND = ("autotune", "data", "dense", "dense", "dense", "moe", "moe", "checks", "report", "between")
JOBS = {"data": 5, "checks": 4, "report": 8}  # that may be let pass
MOST = 0.7  # of a job's length in the first start of all, which is slower than later ones
TRIES = 4  # to hit a stage that comes and goes, within one start
LAST_STEP = 100  # of 121; later ones could be over before the kill comes
MOST_ROUNDS = 4  # for ten kills: a stage may be over before its turn
SHOWN = 5  # differences in the line that ends a session
LOG_LINES = 30


def make_targets(kills: int, rng: random.Random) -> list[list[Target]]:
    """Rounds of at most ten targets. The steps of a run rise; the first kill of a dense run always
    leaves a trainer without Snakemake, with most of its steps to go."""
    rounds = []
    while kills:
        stages = rng.sample(ROUND, min(len(ROUND), kills))
        kills -= len(stages)
        whom = [name for _ in stages for name in rng.sample(WHOM, len(WHOM))]
        targets = [make_target(stage, whom.pop(), len(stages), rng) for stage in stages]
        for run in RUNS:
            own = [target for target in targets if target.stage == run]
            steps = sorted(rng.sample(range(1, LAST_STEP), len(own)))
            for target, step in zip(own, steps, strict=True):
                target.step = step
            if own and run == "dense":
                own[0].whom, own[0].signal = "snakemake", signal.SIGKILL
                own[0].step = rng.randrange(1, LAST_STEP // 4)
            elif own:
                own[0].step = 0
        rounds.append(targets)
    return rounds


def make_target(stage: str, whom: str, kills: int, rng: random.Random) -> Target:
    """A target of a round of so many kills, of a run from its first moment on."""
    between = stage == "between"
    return Target(
        stage,
        step=0,
        whom=rng.choice(WHOM[1:]) if between else whom,
        signal=rng.choices(SIGNALS, WEIGHTS)[0],
        share=rng.random() * MOST,
        after=rng.randrange(kills if between else JOBS.get(stage, 1)),
    )


class Session:
    """Rounds of starts and kills in one tree, compared with another tree that was left alone."""

    def __init__(self, folder: Path, kills: int, rng: random.Random):
        self.whole = Tree(folder / "whole")
        self.whole.lengthen_training()
        self.killed = Tree(folder / "killed", self.whole.root)  # the same, whatever is edited
        self.kills, self.rng = kills, rng
        self.places: Counter = Counter()  # (place, whom) -> kills
        self.hits = self.rounds = self.starts = 0

    def carry_out(self, rounds: list[list[Target]]) -> None:
        """Make all kills. Fault when one can't be made, or a round ends in something else."""
        print(f"undisturbed: {' '.join(COMMAND[2:])}", flush=True)
        if code := self.whole.start().end():
            raise Fault(f"the undisturbed start ended with exit code {code}")
        print(f"undisturbed: complete after {self.whole.seconds:.0f} s", flush=True)
        limit = MOST_ROUNDS * len(rounds)
        while rounds:
            if self.rounds == limit:
                stages = sorted({target.stage for targets in rounds for target in targets})
                raise Fault(f"no kill fell into {', '.join(stages)} in {limit} rounds")
            if missed := self.round(rounds.pop(0)):
                print(f"missed: {', '.join(t.stage for t in missed)}; next round", flush=True)
                rounds.append(missed)

    def round(self, targets: list[Target]) -> list[Target]:
        """From nothing to all results, killed on the way. Returns the targets that it missed."""
        tree, before, complete = self.killed, self.hits, False
        self.rounds += 1
        tree.empty()
        while not complete:
            start, done = tree.start(), []
            self.starts += 1
            while target := self.kill(start, targets, self.hits - before):
                targets.remove(target)
                done.append(target.whom)
            code = start.end()
            if code and not done:
                raise Fault(f"a start that nobody disturbed ended with exit code {code}")
            complete = code == 0 and set(done) <= {"job"}
        tree.await_orphans()
        self.compare()
        for target in targets:  # once more, and sooner
            target.after, target.share = 0, target.share / 2
        return targets

    def kill(self, start: Start, targets: list[Target], hits: int) -> Target | None:
        """Kill at the first of the targets whose stage comes, and return it; None when the start
        ended before."""
        tries: Counter = Counter()
        while True:
            waiting = {}  # the first of each stage
            for target in targets:
                early = target.stage == "between" and target.after > hits
                if not early and tries[target.stage] < TRIES:
                    waiting.setdefault(target.stage, target)
            if not waiting or not (target := start.wait_for(list(waiting.values()))):
                return None
            tries[target.stage] += 1
            # Once the moment was missed, soon. At a step, before the many that follow.
            length = self.whole.lengths.get((target.job, False), 0.5)
            soon = target.step or tries[target.stage] > 1
            time.sleep(target.share * (min(length, 0.1) if soon else length))
            place, living = start.hit(target, self.rng)
            if place:
                self.hits += 1
                self.places[place, target.whom] += 1
                name, number = signal.Signals(target.signal).name, f"kill {self.hits}/{self.kills}"
                print(f"{number} in {place}: {name} to {target.whom} ({living})", flush=True)
                return target

    def compare(self) -> None:
        """Fault unless nothing is left to do, or left behind, and all results are the same."""
        tree = self.killed
        code, output = tree.call(*COMMAND)
        if code or "Nothing to be done" not in output:
            raise Fault(f"a last start found something to do, exit code {code}:\n{output[-3000:]}")
        code, output = tree.call(*COMMAND[:2], "sparkgpt", "verify", "--profile", "smoke")
        if code:
            raise Fault(f"records and files disagree: {output.strip()}")
        wrong = tree.two_writers() + left_behind(tree.results)
        wrong += differences(tree.results, self.whole.results)
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise Fault("; ".join(wrong[:SHOWN]) + more)
        print(f"round {self.rounds}: equal, and nothing to be done", flush=True)

    @property
    def place(self) -> str:
        return f"round {self.rounds}"

    def table(self) -> str:
        return draw_table(self.places, PLACES, WHOM)

    def end_of_log(self) -> list[str]:
        """The last lines of the last start."""
        logs = sorted([*self.killed.logs, *self.whole.logs], key=lambda log: log.stat().st_mtime)
        if not logs:
            return []
        lines = logs[-1].read_text(errors="replace").splitlines()
        return [f"the end of {logs[-1]}:", *lines[-LOG_LINES:]]

    def sum_up(self) -> str:
        return (
            f"{self.hits} kills, {self.starts} starts, {self.rounds} rounds: "
            "all end in the undisturbed results"
        )

    def close(self) -> None:
        """End what either tree has running."""
        self.whole.close()
        self.killed.close()


if __name__ == "__main__":
    sys.exit(carry_out(__doc__.split("\n")[0], 10, Session, make_targets))

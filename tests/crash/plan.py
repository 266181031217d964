"""Where the kills are to fall: variants, phases, steps and delays, all drawn from one seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from child import PHASES

STEPS, SAVE_EVERY = 40, 5
LAST_ORDER = STEPS - SAVE_EVERY  # after this many steps there is still a save to come
MOST_KILLS = {"dense": 8, "moe": 8, "ranks": 4}  # of one run
WITHOUT_LENGTH = ("before rename", "after rename")
OUTSIDE = ("start", "random")  # of any phase that a function makes
ENDING = ("export", "record", "publish")  # in the order in which a run comes to them
MAIN_ONLY = ("twin", *ENDING)  # phases of rank 0 alone
AIMS = ("start", "random", *dict.fromkeys(PHASES.values()), "twin", "export", *WITHOUT_LENGTH)
ANY_STEP = (*OUTSIDE, "resume", *ENDING)
TIMED_TRIES, TRIES = 2, 5


@dataclass
class Target:
    """A kill to be made: in which phase, at which of its entries, and how far into it."""

    variant: str
    phase: str
    rank: int  # the one that is aimed at
    how: str  # "all" processes; or with two ranks the "worker" or torchrun's "agent" alone
    order: int  # of the kills of a run; also the completed steps from which on the phase counts
    skip: int  # entries to let pass
    shares: list[float]  # of the phase's length: until the kill, and until that of orphans
    tries: int = 0

    @property
    def step(self) -> int:
        return 0 if self.phase in ANY_STEP else self.order

    @property
    def held(self) -> dict:
        """What the run is to hold until the kill comes: a phase without length, or one that chance
        has missed; otherwise nothing."""
        missed = self.tries >= TIMED_TRIES and self.phase not in OUTSIDE
        if self.phase not in WITHOUT_LENGTH and not missed:
            return {}
        return {"phase": self.phase, "rank": self.rank, "step": self.step}

    @property
    def is_at_once(self) -> bool:
        """Whether the time until the kill counts from the start, before any process tells."""
        return self.phase == "start" and self.how != "worker"

    def awaited(self) -> Callable[[dict], bool]:
        """A test for the line with which the time until the kill begins."""
        event = {"start": "start", "random": "begin"}.get(self.phase, "enter")
        phase = self.phase if event == "enter" else ""
        left = 0 if self.held else self.skip

        def is_reached(line: dict) -> bool:
            nonlocal left
            told = line["event"], line["phase"], line["rank"]
            if told != (event, phase, self.rank) or line["step"] < self.step:
                return False
            left -= 1
            return left < 0

        return is_reached


def make_targets(kills: int, rng: random.Random) -> list[Target]:
    """`kills` targets: every phase in turn, and with every variant in turn."""
    variants, aims = rng.sample(sorted(MOST_KILLS), 3), rng.sample(AIMS, len(AIMS))
    turns = (divmod(number, len(aims)) for number in range(kills))
    return [_target(variants[(turn + place) % 3], aims[place], rng) for turn, place in turns]


def _target(variant: str, phase: str, rng: random.Random) -> Target:
    two = variant == "ranks"
    first = 3 * SAVE_EVERY if phase == "prune" else 0  # nothing to remove before the fourth save
    order = rng.randrange(first, LAST_ORDER)
    if phase in ENDING:
        order = STEPS + ENDING.index(phase)
    return Target(
        variant,
        phase,
        rank=rng.randrange(2) if two and phase not in MAIN_ONLY else 0,
        how=rng.choice(("all", "worker", "agent")) if two else "all",
        order=order,
        skip=rng.randrange(3) if phase == "record" else 0,  # weights, summary, record
        shares=sorted(rng.random() for _ in range(2)),
    )


def next_run(targets: list[Target]) -> list[Target]:
    """Take off the targets of the next run, of one variant, in the order of the run."""
    variant = targets[0].variant
    chosen = [target for target in targets if target.variant == variant][: MOST_KILLS[variant]]
    for target in chosen:
        targets.remove(target)
    return sorted(chosen, key=lambda target: target.order)

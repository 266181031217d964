"""Times contestants against each other: interleaved rounds after a warm-up of each.

What is timed ends when its results are there: on a CPU, torch's calls return complete. Other work
on a machine swings seconds by a third, hence rounds (A B C, A B C, ...), ratios taken inside each
round, medians, and process CPU time beside wall time.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparkgpt.progress import progress

FALLING = 0.98  # a median below this share of the one before is still falling


class Sample(NamedTuple):
    """Seconds of one step: by the wall's clock, and by the processor over all threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Contestant:
    """`ready(index)` prepares step `index` outside the clock and returns the work to be timed."""

    name: str
    ready: Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class WarmUp:
    """At least `least` (2 or more) steps, then until the median of the last `least // 2` of them
    stops falling against that of as many before, or `most` steps are made."""

    least: int = 6
    most: int = 30


def timed(work: Callable[[], object]) -> Sample:
    """Run `work` once; collecting the garbage of what came before is not on its clock."""
    gc.collect(1)  # young objects: a full collection walks through all the libraries
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def warm_up(contestant: Contestant, rule: WarmUp) -> dict:
    """Step until the rule says warm. `steps` made, wall `seconds` of each, whether it `settled`."""
    seconds: list[float] = []
    settled = False
    while len(seconds) < rule.most and not settled:
        seconds.append(timed(contestant.ready(len(seconds))).wall)
        settled = len(seconds) >= rule.least and has_settled(seconds, rule.least // 2)
    return {"steps": len(seconds), "seconds": seconds, "settled": settled}


def has_settled(seconds: list[float], last: int) -> bool:
    """Whether the median of the `last` newest is no longer below that of the `last` before."""
    before, now = seconds[-2 * last : -last], seconds[-last:]
    return statistics.median(now) >= FALLING * statistics.median(before)


def run_rounds(
    contestants: list[Contestant], rounds: int, rule: WarmUp
) -> tuple[dict[str, dict], dict[str, list[Sample]]]:
    """Warm each up, then time one step of each in every round, all on that round's index.

    Returns by name the warm-ups, and the samples of all rounds in order.
    """
    gc.collect()
    gc.freeze()  # what stays, models and libraries, is no step's garbage
    try:
        return _run_rounds(contestants, rounds, rule)
    finally:
        gc.unfreeze()


def _run_rounds(contestants: list[Contestant], rounds: int, rule: WarmUp) -> tuple[dict, dict]:
    warmed = {}
    with progress("warm-up, contestants", len(contestants)) as bar:
        for contestant in contestants:
            warmed[contestant.name] = warm_up(contestant, rule)
            bar.advance(1, contestant.name)
    samples: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
    first = max(warm["steps"] for warm in warmed.values())
    with progress("benchmark, rounds", rounds) as bar:
        for number in range(rounds):
            for contestant in contestants:
                samples[contestant.name].append(timed(contestant.ready(first + number)))
            bar.advance()
    return warmed, samples


def spread(values: list[float]) -> dict[str, float]:
    """Median, and where the lowest fifth ends and the highest begins (linear between samples)."""
    quantiles = np.quantile(values, (0.5, 0.2, 0.8)).tolist()
    return dict(zip(("median", "p20", "p80"), quantiles, strict=True))


def ratio(top: list[float], bottom: list[float]) -> dict[str, float]:
    """Spread of top / bottom inside each round, where both met the same load."""
    return spread([a / b for a, b in zip(top, bottom, strict=True)])

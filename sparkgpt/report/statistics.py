"""Paired statistics of matched runs: mean difference, Student's t interval, wins, verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# Below this many pairs an interval that holds 0 says nothing about equality: at 2 pairs it is
# 12.7 standard errors wide on each side, at 5 it is 2.8.
FEW_PAIRS = 5


@dataclass(frozen=True)
class Paired:
    """Differences a - b of matched pairs, in the unit of the values."""

    differences: dict[int, float]
    mean: float
    interval: tuple[float, float] | None
    wins_a: int
    wins_b: int

    @property
    def pairs(self) -> int:
        return len(self.differences)


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The two-sided 95 % interval of the mean: mean +- t(n-1) * s / sqrt(n), s with n - 1.

    Student (1908), "The probable error of a mean". None for fewer than two values.
    """
    if len(values) < 2:
        return None
    import numpy as np
    from scipy.stats import t

    array = np.asarray(values, dtype=np.float64)
    error = array.std(ddof=1) / np.sqrt(len(array))
    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(array) - 1) * error)
    return float(array.mean()) - half, float(array.mean()) + half


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Pair two seed -> value maps by seed; seeds in only one of them are left out."""
    differences = {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}
    values = list(differences.values())
    return Paired(
        differences=differences,
        mean=sum(values) / len(values),
        interval=t_interval(values),
        wins_a=sum(value < 0 for value in values),
        wins_b=sum(value > 0 for value in values),
    )


def verdict(a: str, b: str, result: Paired) -> str:
    """What the pairs show about which of rows `a` and `b` has the lower loss; never from one."""
    if result.interval is None:
        return "one pair: no verdict"
    low, high = result.interval
    if high < 0:
        return f"{a} lower"
    if low > 0:
        return f"{b} lower"
    if result.pairs < FEW_PAIRS:
        return "no difference shown; too few pairs to claim no difference"
    return "no difference shown"

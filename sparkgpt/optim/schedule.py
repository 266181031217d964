"""The learning-rate schedule: a pure function of the step."""

import math


def lr_factor(step: int, total_steps: int, warmup_frac: float, floor: float) -> float:
    """Share of the peak rate for zero-based `step` of a schedule of `total_steps`.

    Linear warm-up over max(10, ceil(warmup_frac * total_steps)) steps, then a cosine that reaches
    `floor` at the last step. Depends on the schedule's length alone, so a run stopped early is an
    exact prefix.
    """
    warmup = max(10, math.ceil(warmup_frac * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    share = min(1.0, (step - warmup + 1) / max(1, total_steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

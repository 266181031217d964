"""Rows of matched runs, paired by seed: the statistics behind `sparkgpt compare`.

Runs are matched when they trained on the same documents in the same order for as many tokens and
were validated on the same text; anything else is refused, since its difference would mean nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.report import cells
from sparkgpt.report.records import Run, of_row
from sparkgpt.report.statistics import CONFIDENCE, Paired, paired, verdict

# Equal over all runs of a comparison, and equal within each pair of one seed.
SHARED = {
    "train_digest": "training data",
    "val_digest": "held-out data",
    "val_tokens": "held-out tokens",
}
PER_SEED = {"stream_digest": "order of the training data", "real_tokens": "tokens trained on"}


def comparison(runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The content of compare.json. UserError when runs are missing or not matched."""
    compared = [compare_rows(runs, *pair) for pair in pairs]
    return {"schema": 1, "confidence": CONFIDENCE, "unit": "nats per target", "pairs": compared}


def compare_rows(runs: Sequence[Run], a: str, b: str) -> dict[str, Any]:
    """Compare rows `a` and `b` by final held-out loss, a - b, one pair for each common seed."""
    runs_a = {run.seed: run for run in of_row(runs, a)}
    runs_b = {run.seed: run for run in of_row(runs, b)}
    seeds = sorted(runs_a.keys() & runs_b.keys())
    if not seeds:
        known = ", ".join(dict.fromkeys(run.row for run in runs))
        raise UserError(
            f"rows {a!r} (seeds {sorted(runs_a)}) and {b!r} (seeds {sorted(runs_b)}) have no seed "
            f"in common; run both rows with the same seeds (recorded rows: {known or 'none'})"
        )
    for seed in seeds:
        _check_matched(runs_a[seed], runs_b[seed], SHARED | PER_SEED)
        _check_matched(runs_a[seeds[0]], runs_a[seed], SHARED)
    losses_a = {seed: _final_loss(runs_a[seed]) for seed in seeds}
    losses_b = {seed: _final_loss(runs_b[seed]) for seed in seeds}
    result = paired(losses_a, losses_b)
    return {
        "a": a,
        "b": b,
        "losses_a": _by_seed(losses_a),
        "losses_b": _by_seed(losses_b),
        "unpaired": sorted(
            run.summary.run for run in [*runs_a.values(), *runs_b.values()] if run.seed not in seeds
        ),
        **_as_json(result),
        "verdict": verdict(a, b, result),
        "curve": _curve([(runs_a[seed], runs_b[seed]) for seed in seeds]),
        "matched": {name: getattr(runs_a[seeds[0]].summary, name) for name in SHARED},
    }


def matched_table(comparison: dict[str, Any]) -> str:
    """The matched runs as Markdown, from the content of compare.json."""
    header = ["pair", "difference of each seed", "mean", "95 % interval", "n", "wins", "verdict"]
    rows = []
    for pair in comparison["pairs"]:
        each = (f"s{seed} {value:+.4f}" for seed, value in pair["differences"].items())
        rows.append(
            [
                cells.text(f"{pair['a']} - {pair['b']}"),
                ", ".join(each),
                cells.signed(pair["mean"]),
                cells.interval(pair["interval"]),
                str(pair["n"]),
                f"{pair['wins_a']} : {pair['wins_b']}",
                cells.text(pair["verdict"]),
            ]
        )
    return cells.table(header, rows)


def _curve(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, Any]]:
    """The paired differences at each validation that all of the runs have."""
    losses = [tuple(run.metrics.series("val", "val/loss") for run in pair) for pair in pairs]
    common = set.intersection(*(set(curve) for pair in losses for curve in pair))
    points = []
    for step in sorted(common):
        at_a = {pair[0].seed: curves[0][step] for pair, curves in zip(pairs, losses, strict=True)}
        at_b = {pair[0].seed: curves[1][step] for pair, curves in zip(pairs, losses, strict=True)}
        points.append({"step": step, **_as_json(paired(at_a, at_b))})
    return points


def _as_json(result: Paired) -> dict[str, Any]:
    return {
        "differences": _by_seed(result.differences),
        "n": result.pairs,
        "mean": result.mean,
        "interval": result.interval,
        "wins_a": result.wins_a,
        "wins_b": result.wins_b,
    }


def _by_seed(values: dict[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in values.items()}


def _check_matched(a: Run, b: Run, names: dict[str, str]) -> None:
    for name, meaning in names.items():
        value_a, value_b = getattr(a.summary, name), getattr(b.summary, name)
        if value_a != value_b:
            raise UserError(
                f"{a.summary.run} and {b.summary.run} are not matched: {meaning} ({name}) is "
                f"{value_a} in {a.path}, {value_b} in {b.path}; run both on the same data"
            )


def _final_loss(run: Run) -> float:
    loss = run.summary.final_val_loss
    if loss is None or not math.isfinite(loss):
        raise UserError(
            f"{run.path / 'summary.json'} has final_val_loss {loss}: nothing to compare; "
            "run it with --val-path, and look at its curve if the loss is not finite"
        )
    return loss

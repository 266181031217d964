"""`sparkgpt reproduced`: what was published against what this machine measured, row by row.

Held-out losses must agree within a tolerance. Speeds are shown, never judged. Weights digests are
shown too: they are equal only on one machine with equal library versions.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.report import cells
from sparkgpt.report.readme import newest
from sparkgpt.report.records import Run, load_runs

# Three times the spread between two seeds of the first published rows: other last bits (threads,
# processor, libraries) move a short run about as far as another seed does.
TOLERANCE_NATS = 0.1


def main(argv: list[str]) -> int:
    """Print the table. UserError with exit code 1 names every run that was not reproduced."""
    arguments = _parser().parse_args(argv)
    published = (
        Path(arguments.published) if arguments.published else newest(Path(arguments.results))
    )
    if published is None:
        print(f"no version is published in {arguments.results} yet: nothing to compare with")
        return 0
    here = {run.summary.run: run for run in load_runs(arguments.reproduced)}
    there = {run.summary.run: run for run in load_runs(published)}
    if not there:
        raise UserError(f"{published} holds no runs; name a published version with --published")
    entries = [
        compare_run(name, there[name], here.get(name), arguments.tolerance) for name in there
    ]
    if arguments.json:
        print(json.dumps({"published": str(published), "runs": entries}))
    else:
        print(f"Published ({published}) against reproduced ({arguments.reproduced}):\n")
        print(_table(entries))
    for name in sorted(here.keys() - there.keys()):
        print(f"{name}: not in {published}, nothing to compare with", file=sys.stderr)
    _refuse([entry for entry in entries if not entry["ok"]], arguments.tolerance)
    return 0


def compare_run(name: str, there: Run, here: Run | None, tolerance: float) -> dict[str, Any]:
    """One published run against its reproduction: losses in nats per target, speeds in tokens/s."""
    entry = {
        "run": name,
        "published_loss": there.summary.final_val_loss,
        "published_speed": there.summary.real_tokens_per_second,
    }
    if here is None:
        return {**entry, "ok": False, "reason": "was not run here"}
    losses = (there.summary.final_val_loss, here.summary.final_val_loss)
    difference = None if None in losses else losses[1] - losses[0]
    return {
        **entry,
        "reproduced_loss": losses[1],
        "reproduced_speed": here.summary.real_tokens_per_second,
        "difference": difference,
        "weights_equal": _same(there.summary.weights_sha256, here.summary.weights_sha256),
        **_judged(there, here, difference, tolerance),
    }


def _same(there: str | None, here: str | None) -> bool | None:
    return None if None in (there, here) else there == here


def _judged(there: Run, here: Run, difference: float | None, tolerance: float) -> dict[str, Any]:
    if there.summary.val_digest != here.summary.val_digest:
        return {"ok": False, "reason": "was validated on other held-out data"}
    if difference is None or not abs(difference) <= tolerance:  # a NaN is not within it either
        return {"ok": False, "reason": f"differs by {cells.signed(difference)} nats"}
    return {"ok": True, "reason": ""}


def _table(entries: list[dict[str, Any]]) -> str:
    header = ["run", "published nats", "reproduced", "difference", "weights"]
    header += ["published real tok/s", "here", "result"]
    return cells.table(header, [_cells(entry) for entry in entries], numeric=1)


def _cells(entry: dict[str, Any]) -> list[str]:
    weights = {True: "equal", False: "differ", None: cells.NOT_MEASURED}
    return [
        cells.text(entry["run"]),
        cells.nats(entry["published_loss"]),
        cells.nats(entry.get("reproduced_loss")),
        cells.signed(entry.get("difference")),
        weights[entry.get("weights_equal")],
        cells.count(entry["published_speed"]),
        cells.count(entry.get("reproduced_speed")),
        "reproduced" if entry["ok"] else "NOT REPRODUCED",
    ]


def _refuse(failed: list[dict[str, Any]], tolerance: float) -> None:
    if failed:
        reasons = "; ".join(f"{entry['run']} {entry['reason']}" for entry in failed)
        raise UserError(
            f"not reproduced within {tolerance} nats: {reasons}; "
            "compare the environments in the two run.json files",
            exit_code=1,
        )


def _parser() -> Parser:
    parser = Parser(
        prog="sparkgpt reproduced", description="Compare published runs with those made here."
    )
    parser.add_argument("--published", help="published version (default: newest in --results)")
    parser.add_argument("--results", default="results", help="folder of published versions")
    parser.add_argument("--reproduced", default="results/cpu", help="records made here")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE_NATS, metavar="NATS", help="per run, in nats"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser

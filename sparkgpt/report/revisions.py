"""`sparkgpt compare --base REV ROW`: one row, trained by this tree and by another revision.

The other tree stands in a git worktree while it is needed. Both train through their own command
line, seed by seed and in turns, on the same bytes in the same order; otherwise nothing is trained.
The records folder that results is one like any other, with a run.json that names both trees.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.files import read_section, write_json, write_text
from sparkgpt.fingerprint import ROOT, fingerprint
from sparkgpt.report import cells
from sparkgpt.report.matched import comparison
from sparkgpt.report.plots import draw
from sparkgpt.report.records import Run, load_run, load_runs
from sparkgpt.report.render import load_report
from sparkgpt.report.statistics import paired
from sparkgpt.report.tables import document
from sparkgpt.report.worktree import Tree, commit, describe, signals, start, worktree

HERE, BASE = "here", "base"
PLOTS = ("loss", "matched", "throughput")


@dataclass(frozen=True)
class Plan:
    """What both trees are asked to do, and where it goes."""

    row: str
    seeds: tuple[int, ...]
    threads: int
    data: Path
    out: Path

    def run_name(self, tree: Tree, seed: int) -> str:
        return f"{self.row}-{tree.label}-s{seed}"

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def flags(self, tree: Tree, seed: int) -> list[str]:
        """What every start of the trainer has in common, a probe included."""
        paths = {"--train-path": "train.cache", "--val-path": "val.cache"}
        data = [word for flag, name in paths.items() for word in (flag, str(self.data / name))]
        return [*tree.flags, "--seed", str(seed), *data, "--threads", str(self.threads)]


def compare_revisions(arguments: Any) -> dict[str, Any]:
    """Train, compare, and write the records folder; the value is its compare.json.

    UserError when a tree lacks the row, the trees don't agree on the data, or a run fails.
    """
    found = commit(arguments.base)
    plan = _plan(arguments, found)
    with signals(), worktree(found) as base:
        trees = [
            describe(label, root, arguments.profile, plan.row, arguments.flags)
            for label, root in ((HERE, ROOT), (BASE, base))
        ]
        streams = _same_streams(trees, plan)
        for tree in trees:
            _autotune(tree, plan)
        for number, seed in enumerate(plan.seeds):
            # In turns, so that a machine that slows down slows both alike.
            for tree in trees if number % 2 else reversed(trees):
                _train(tree, plan, seed)
    return _report(plan, trees, streams, {"revision": arguments.base, "commit": found})


def speeds(runs_here: Sequence[Run], runs_base: Sequence[Run]) -> dict[str, Any]:
    """Window tokens per second, this tree over the base, minus 1: paired by seed."""
    base = {run.seed: run.summary.window_tokens_per_second for run in runs_base}
    ratios = {
        run.seed: run.summary.window_tokens_per_second / base[run.seed] - 1
        for run in runs_here
        if run.seed in base
    }
    result = paired(ratios, dict.fromkeys(ratios, 0.0))
    return {
        "differences": {str(seed): value for seed, value in result.differences.items()},
        "mean": result.mean,
        "interval": result.interval,
        "n": result.pairs,
    }


def _plan(arguments: Any, commit_id: str) -> Plan:
    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in arguments.seeds.split(",")))
    except ValueError:
        raise UserError(f"--seeds {arguments.seeds!r}: write whole numbers, as 0,1,2") from None
    (row,) = arguments.rows
    results = Path("results", arguments.profile)
    for split in ("train", "val"):
        if not (results / "data" / f"{split}.cache" / "manifest.json").is_file():
            raise UserError(
                f"{results / 'data'} has no {split}.cache to train on; run the pipeline first: "
                f"snakemake --cores all --config profile={arguments.profile}"
            )
    out = Path(arguments.out or results / "revisions" / f"{row}-{commit_id[:12]}")
    cores = len(os.sched_getaffinity(0))
    return Plan(row, seeds, arguments.threads or cores, results / "data", out)


def _same_streams(trees: list[Tree], plan: Plan) -> dict[str, dict[str, Any]]:
    """What each tree would train on, asked of its trainer by one step. UserError unless equal."""
    streams = {}
    with tempfile.TemporaryDirectory(prefix="sparkgpt-probe-") as folder:
        for tree in trees:
            flags = [*plan.flags(tree, plan.seeds[0]), "--run-name", tree.label]
            flags += ["--out-dir", folder, "--max-train-steps", "1"]
            flags += ["--no-save-final", "--no-hf-export"]
            start(tree, "sparkgpt.train", flags, plan.log(f"probe-{tree.label}"))
            streams[tree.label] = read_section(Path(folder, tree.label, "config.json"), "data")
    for name in ("train", "val", "stream"):
        here, base = (streams[label][name] for label in (HERE, BASE))
        if here != base:
            raise UserError(
                f"the two trees do not train on the same stream: {name} is {here} in this tree, "
                f"{base} in the base; nothing was trained, since no difference would mean anything"
            )
    return streams


def _autotune(tree: Tree, plan: Plan) -> None:
    """Each tree has the fastest kernels of its own code."""
    record = _autotune_record(tree, plan)
    if not record.is_file():
        flags = ["autotune", *tree.autotune, "--threads", str(plan.threads), "--out", str(record)]
        start(tree, "sparkgpt", flags, plan.log(f"autotune-{tree.label}"))


def _autotune_record(tree: Tree, plan: Plan) -> Path:
    return plan.out / f"autotune-{tree.label}-{tree.code[:12]}.json"


def _train(tree: Tree, plan: Plan, seed: int) -> None:
    """One run; a complete one is adopted by the trainer itself, an interrupted one resumed."""
    name = plan.run_name(tree, seed)
    folder = plan.out / "runs" / name
    flags = [*plan.flags(tree, seed), "--run-name", name, "--publish", str(folder)]
    flags += ["--autotune", str(_autotune_record(tree, plan)), "--expect-code", tree.code]
    values = fingerprint({"code": tree.code, "flags": plan.flags(tree, seed)})
    flags += ["--out-dir", str(plan.out / "work" / values[:16])]
    flags += ["--resume", "--save-final", "--no-hf-export"]
    start(tree, "sparkgpt.train", flags, plan.log(name))
    summary = load_run(folder).summary
    print(
        f"{name}: {cells.nats(summary.final_val_loss)} nats, "
        f"{cells.count(summary.window_tokens_per_second)} window tok/s",
        file=sys.stderr,
    )


def _report(plan: Plan, trees: list[Tree], streams: dict, base: dict[str, str]) -> dict[str, Any]:
    """Write what a records folder holds beside its runs; the value is compare.json."""
    rows = [f"{plan.row}-{tree.label}" for tree in trees]
    runs = load_runs(plan.out)
    of = {row: [r for r in runs if r.row == row and r.seed in plan.seeds] for row in rows}
    result = comparison([run for row in rows for run in of[row]], [(rows[0], rows[1])])
    result["speed"] = speeds(of[rows[0]], of[rows[1]])
    result["base"] = base
    write_json(plan.out / "compare.json", result)
    named = {
        tree.label: {
            "tree": _one_tree(of[row]),
            "code": tree.code,
            "flags": shlex.join(tree.flags),
            "stream": streams[tree.label],
        }
        for tree, row in zip(trees, rows, strict=True)
    }
    record = {"schema": 1, "row": plan.row, "seeds": list(plan.seeds), "base": base, "trees": named}
    write_json(plan.out / "run.json", record)
    seeds = ",".join(map(str, plan.seeds))
    labels = (f"{plan.row}, this tree", f"{plan.row}, {base['revision']}")
    table = "".join(f"{row}\t{label}\t{seeds}\n" for row, label in zip(rows, labels, strict=True))
    write_text(plan.out / "rows.tsv", "row\tlabel\tseeds\n" + table)
    report = load_report(plan.out, plan.out / "rows.tsv")
    write_text(plan.out / "tables.md", document(report, ""))
    for name in PLOTS:
        draw(name, report, plan.out / "plots" / f"{name}.svg")
    _say(plan, result["speed"])
    return result


def _one_tree(runs: list[Run]) -> dict[str, Any]:
    """The tree that all runs of a side were made from: of the last one, if docs changed between."""
    return runs[-1].provenance["tree"]


def _say(plan: Plan, speed: dict[str, Any]) -> None:
    share = lambda value: f"{100 * value:+.2f} %"
    interval = speed["interval"]
    bounds = f"[{share(interval[0])}, {share(interval[1])}]" if interval else "none"
    print(
        f"speed of this tree over the base: {share(speed['mean'])}, 95 % interval {bounds}, "
        f"n = {speed['n']}; records, tables and plots in {plan.out}",
        file=sys.stderr,
    )

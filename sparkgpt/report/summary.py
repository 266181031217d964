"""`sparkgpt summary`: what a start of the pipeline ran, what it reused, and where things lie.

What ran comes from Snakemake's log of that start; what was reused is everything else that is there.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.report import cells, render

# Rule -> its outputs in a records folder, one pattern for each job.
OUTPUTS = {
    "fetch": ("raw/*.verified.json",),  # without this there is no telling which raw files are ours
    "cache": ("data/*.cache/manifest.json",),
    "autotune": ("autotune.json",),
    "train": ("runs/*/summary.json",),
    "export": ("runs/*/hf/config.json",),
    "check": ("runs/*/check_hf.json", "runs/*/check_mlx.json"),
    "compare": ("compare.json",),
    "tables": ("tables.md",),
    "plot": ("plots/*.svg",),
    "page": ("index.html",),
}
JOB = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):$")
FIELD = re.compile(r"^    (jobid|output): (.+)$")
STAMP = re.compile(r"^\[(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\]$")
FINISHED = re.compile(r"^Finished jobid: (\d+) ")
FAILED = re.compile(r"^Error in rule (\w+):$")


@dataclass
class Job:
    """One job of Snakemake's log; `seconds` from its start to its end, to the second."""

    rule: str
    outputs: list[str] = field(default_factory=list)
    started: datetime | None = None
    seconds: float = 0.0
    state: str = "stopped"


def main(argv: list[str]) -> int:
    """Print the summary. UserError when the results or the log are not there."""
    parser = Parser(prog="sparkgpt summary", description="What a start of the pipeline did.")
    parser.add_argument("results", help="a profile's folder, such as results/cpu")
    parser.add_argument("--log", nargs="*", default=[], help="Snakemake's log of that start")
    arguments = parser.parse_args(argv)
    results = Path(arguments.results)
    if not results.is_dir():
        raise UserError(f"{results} is not there; run the pipeline first")
    jobs = [job for log in arguments.log for job in read_log(Path(log).read_text("utf-8"))]
    _print("Steps", steps(results, jobs))
    for records in _records(results, jobs):
        report = render.load_report(records)
        if report.runs:
            _print(f"Rows in {records}", rows(report))
        if report.comparison:
            _print(f"Matched runs in {records}", pairs(report.comparison))
    for line in [*failures(jobs), *places(_records(results, jobs))]:
        print(line)
    return 0


def read_log(text: str) -> list[Job]:
    """The jobs of a log of Snakemake, each with what became of it."""
    jobs: dict[str, Job] = {}
    now, current, failing = None, None, False
    for line in text.splitlines():
        if stamp := STAMP.match(line):
            now = datetime.strptime(stamp[1], "%a %b %d %H:%M:%S %Y")
        elif job := JOB.match(line):
            current, failing = Job(job[1], started=now), False
        elif FAILED.match(line):
            failing = True
        elif (found := FIELD.match(line)) and found[1] == "jobid":
            if failing and found[2] in jobs:
                jobs[found[2]].state = "failed"
            elif current:
                jobs[found[2]] = current
        elif found and current and not failing:
            current.outputs = found[2].split(", ")
        elif (done := FINISHED.match(line)) and done[1] in jobs:
            job = jobs[done[1]]
            job.state = "made"
            if now and job.started:
                job.seconds = (now - job.started).total_seconds()
    return [job for job in jobs.values() if job.outputs]


def steps(results: Path, jobs: list[Job]) -> list[list[str]]:
    """Header and one line a rule: made now, reused, failed, minutes."""
    made = {path for job in jobs if job.state == "made" for path in job.outputs}
    folders = [results, *(path.parent for path in sorted(results.glob("*/runs")))]
    lines = [["step", "made now", "reused", "failed", "time"]]
    for rule, patterns in OUTPUTS.items():
        files = {str(path) for x in patterns for folder in folders for path in folder.glob(x)}
        own = [job for job in jobs if job.rule == rule or job.rule.startswith(f"{rule}_")]
        seconds = sum(job.seconds for job in own)
        failed = sum(job.state == "failed" for job in own)
        fresh, kept = len(files & made), len(files - made)
        if fresh or kept or failed:
            counts = [str(number or "") for number in (fresh, kept, failed)]
            lines.append([rule, *counts, _duration(seconds) if fresh or failed else ""])
    return lines


def rows(report: render.Report) -> list[list[str]]:
    """Header and one line a row: what the terminal has room for."""
    lines = [["row", "parameters", "real tok/s", "nats", "bits", "seeds"]]
    for model in render.models(report):
        measured = [seed for seed, values in model["seeds"].items() if values["run"]]
        lines.append(
            [
                cells.text(model["label"]),
                cells.count(model["parameters"]),
                cells.count(model["real_tokens_per_second"]),
                cells.nats(model["final_val_loss"]),
                cells.nats(model["final_val_bpb"]),
                ", ".join(map(str, measured)),
            ]
        )
    return lines


def pairs(comparison: dict[str, Any]) -> list[list[str]]:
    """Header and one line a pair of rows."""
    lines = [["pair", "mean", "95 % interval", "n", "verdict"]]
    for pair in comparison["pairs"]:
        figures = [cells.signed(pair["mean"]), cells.interval(pair["interval"]), str(pair["n"])]
        lines.append([f"{pair['a']} - {pair['b']}", *figures, pair["verdict"]])
    return lines


def failures(jobs: list[Job]) -> list[str]:
    """One line a job that failed."""
    return [f"failed: {x.rule}, which makes {x.outputs[0]}" for x in jobs if x.state == "failed"]


def places(folders: list[Path]) -> list[str]:
    """Where to look, a line for each thing that is there."""
    names = {"page": "index.html", "tables": "tables.md", "plots": "plots", "records": "runs"}
    return [
        f"{name}: {folder / file}"
        for folder in folders
        for name, file in names.items()
        if (folder / file).exists()
    ]


def _records(results: Path, jobs: list[Job]) -> list[Path]:
    """The records folders in which something was made; the profile's own when there is none."""
    made = [Path(path) for job in jobs if job.state == "made" for path in job.outputs]
    touched = {path.parents[2] for path in made if path.match("runs/*/summary.json")}
    touched |= {path.parent for path in made if path.name in ("tables.md", "compare.json")}
    return sorted(touched) or [results]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _print(title: str, lines: Iterable[list[str]]) -> None:
    """A table: drawn on a terminal, Markdown elsewhere."""
    header, *body = lines
    if not sys.stdout.isatty():
        print(f"\n{title}\n\n{cells.table(header, body, numeric=1)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in body:
        table.add_row(*line)
    Console().print(table)

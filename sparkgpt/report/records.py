"""Run records as frozen values: what a report may know about a run, read once and checked.

A records folder holds `runs/<run>/` with summary.json, metrics.jsonl, config.json, run.json and,
after the export checks, check_hf.json and check_mlx.json. Losses are nats per target.
"""

import csv
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.files import read_json

RECORD_FILES = ("config.json", "metrics.jsonl", "summary.json", "run.json")
CHECK_FILES = ("check_hf.json", "check_mlx.json")


@dataclass(frozen=True)
class Summary:
    """The final figures of a run that reports use; names as in summary.json."""

    run: str
    row: str
    seed: int
    steps: int
    real_tokens: int
    window_tokens: int
    utilization: float
    parameters: int
    active_parameters: int
    window_tokens_per_second: float
    real_tokens_per_second: float
    wall_seconds: float
    final_val_loss: float | None
    final_val_bpb: float | None
    val_tokens: int
    train_digest: str
    val_digest: str | None
    stream_digest: str
    weights_sha256: str | None
    skipped_steps: int = 0  # that the guard left out; older records have no such figure


@dataclass(frozen=True)
class Check:
    """One export loaded in another library; names as in check_*.json."""

    run: str
    library: str
    version: str
    max_logit_difference: float | None
    tolerance: float
    greedy_equal: bool
    tokenizer_round_trips: int
    library_val_loss: float | None
    final_val_loss: float | None
    ok: bool


@dataclass(frozen=True)
class Metrics:
    """The logged lines of a run, in step order; the last line of a step counts."""

    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    skip: list[dict[str, Any]]  # steps that the guard left out

    def series(self, kind: str, key: str) -> dict[int, Any]:
        """step -> value over the `train` or `val` lines that hold `key`."""
        return {line["step"]: line[key] for line in getattr(self, kind) if key in line}


@dataclass(frozen=True)
class Run:
    """One run's folder. Raises UserError on access when a record is damaged."""

    path: Path
    summary: Summary
    provenance: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def row(self) -> str:
        return self.summary.row

    @property
    def seed(self) -> int:
        return self.summary.seed

    @cached_property
    def metrics(self) -> Metrics:
        return read_metrics(self.path / "metrics.jsonl")


@dataclass(frozen=True)
class Row:
    """One line of a report: the runs that differ only in their seed. Empty seeds: all recorded."""

    name: str
    label: str
    group: str = ""
    seeds: tuple[int, ...] = ()


def load_runs(records: Path | str, rows: Sequence[Row] | None = None) -> list[Run]:
    """All runs of a records folder, or those that `rows` names, in order of row and seed.

    A run without a folder is left out: it was not measured. A folder that lacks a record is an
    error, because a run appears whole or not at all.
    """
    folders = [p for p in sorted((Path(records) / "runs").glob("*")) if _is_run(p)]
    runs = [load_run(folder) for folder in folders if rows is None or _wanted(folder.name, rows)]
    order = [row.name for row in rows or []]
    place = lambda run: order.index(run.row) if run.row in order else len(order)
    return sorted(runs, key=lambda run: (place(run), run.row, run.seed))


def load_run(folder: Path) -> Run:
    """Read one run's folder. UserError names the file that is missing or damaged."""
    for name in RECORD_FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: half a record; run this row again")
    summary = _typed(Summary, folder / "summary.json")
    if summary.run != folder.name:
        raise UserError(
            f"{folder / 'summary.json'} belongs to run {summary.run!r}; "
            f"rename the folder to that or run {folder.name} again"
        )
    present = [folder / name for name in CHECK_FILES if (folder / name).is_file()]
    checks = tuple(_typed(Check, path) for path in present)
    return Run(folder, summary, _object(folder / "run.json"), checks)


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl. UserError names the line that is not a whole JSON object."""
    lines: dict[str, dict[int, dict]] = {"train": {}, "val": {}, "skip": {}}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            lines[line["kind"]][line["step"]] = line
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} line {number} is damaged ({error}); run this row again"
            ) from error
    ordered = {kind: [steps[s] for s in sorted(steps)] for kind, steps in lines.items()}
    return Metrics(**ordered)


def parse_run_name(name: str) -> tuple[str, int | None]:
    """`dense-s0` -> ("dense", 0); a name without `-s<seed>` is its own row, seed None."""
    match = re.fullmatch(r"(.+)-s(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a runs table (TSV with a header; `row` is required, `label`, `group` and `seeds`
    are used when they are there, other columns are not). Lines of one row join their seeds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the runs table {path}: {error.strerror}") from error
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(lines, delimiter="\t")
    if "row" not in (reader.fieldnames or ()):
        raise UserError(f"the runs table {path} has no column 'row'; name it in the first line")
    rows: dict[str, Row] = {}
    for line in reader:
        row = _row(path, line)
        known = rows.get(row.name)
        seeds = row.seeds if known is None else known.seeds + row.seeds
        rows[row.name] = dataclasses.replace(known or row, seeds=tuple(dict.fromkeys(seeds)))
    return list(rows.values())


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """The rows that these runs make up, in their order."""
    return [Row(name, name) for name in dict.fromkeys(run.row for run in runs)]


def of_row(runs: Iterable[Run], row: str) -> list[Run]:
    """The runs of one row."""
    return [run for run in runs if run.row == row]


def one_value(runs: Sequence[Run], name: str) -> Any:
    """The summary value that all runs of a row share. UserError when they do not."""
    values = {getattr(run.summary, name): run for run in runs}
    if len(values) > 1:
        (a, first), (b, second) = list(values.items())[:2]
        raise UserError(
            f"{first.path} has {name} {a}, {second.path} has {b}: not one row; "
            "run the older one again"
        )
    return next(iter(values))


def _row(path: Path | str, line: dict[str, str | None]) -> Row:
    name = (line["row"] or "").strip()
    seeds = re.split(r"[,\s]+", (line.get("seeds") or "").strip())
    try:
        numbers = tuple(int(seed) for seed in seeds if seed)
    except ValueError as error:
        raise UserError(
            f"{path}: row {name!r} has seeds {line['seeds']!r}; write whole numbers, as 0,1"
        ) from error
    label, group = (line.get("label") or "").strip(), (line.get("group") or "").strip()
    return Row(name, label or name, group, numbers)


def _is_run(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _wanted(run: str, rows: Sequence[Row]) -> bool:
    name, seed = parse_run_name(run)
    return any(row.name == name and (not row.seeds or seed in row.seeds) for row in rows)


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; make it again")
    return value


def _typed(kind: type, path: Path) -> Any:
    """Build the dataclass `kind` from a JSON file; further keys are allowed, missing ones
    only where the class has a default."""
    data = _object(path)
    values = {}
    for item in dataclasses.fields(kind):
        allowed = item.type | int if item.type in (float, float | None) else item.type
        if item.name not in data and item.default is not dataclasses.MISSING:
            continue
        if item.name not in data:
            raise UserError(f"{path} has no {item.name!r}: half a record; make it again")
        if not isinstance(data[item.name], allowed):
            raise UserError(
                f"{path}: {item.name!r} cannot be {data[item.name]!r}; the record is damaged, "
                "make it again"
            )
        values[item.name] = data[item.name]
    return kind(**values)

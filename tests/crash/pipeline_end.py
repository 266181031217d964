"""What the results of disturbed starts must share with those of a start left alone."""

import json
from collections.abc import Callable
from pathlib import Path

from compare import CLOCKS, record, summary
from helpers.runs import timeless

from sparkgpt.files import read_json

OWN = ("state.json", "manifest.json", "config.json")  # of checkpoints and of attempts
CLOCKED = ("index.html", "throughput.svg", "ready.txt", ".log", ".tsv", ".lock")
# Times, rates and what was fastest; on a CPU all that may win are identical to the bit.
TIMES = (*CLOCKS, "_ms", "_ns", "winner")


def differences(found: Path, expected: Path) -> list[str]:
    """What differs between two results folders, a line each."""
    names, others = names_in(found), names_in(expected)
    # A run that was asked to stop has checkpoints of its own.
    wrong = [f"{name} is missing" for name in sorted(others - names) if name[:5] != "work/"]
    more = [name for name in sorted(names - others) if name[:5] != "work/"]
    wrong += [f"{name} is there, and shouldn't be" for name in more]
    for name in sorted(names & others):
        path, other = found / name, expected / name
        if (read := reader(path, found)) and read(path) != read(other):
            wrong.append(f"{name} differs")
    for run in sorted(found.glob("runs/*")):
        wrong += broken_chain(run)
    return wrong


def left_behind(results: Path) -> list[str]:
    """Files and folders that a killed writer left half done."""
    left = sorted(
        p.relative_to(results) for p in results.rglob("*") if p.suffix in (".tmp", ".old")
    )
    parts = sorted(p.relative_to(results) for p in results.rglob(".pip-*"))
    return [f"{path} was left behind" for path in [*left, *parts]]


def names_in(results: Path) -> set[str]:
    return {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()}


def reader(path: Path, results: Path) -> Callable[[Path], object] | None:
    """How to read a file for its result alone; None for one that is all clocks."""
    folder, *inner = path.relative_to(results).parts
    if folder == "jobs" or path.name.endswith(CLOCKED) or (folder == "work" and path.name in OWN):
        return None
    readers = {
        "metrics.jsonl": lambda file: timeless(file.parent),
        "summary.json": lambda file: summary(file.parent),
        "run.json": lambda file: record(file.parent),
        "tables.md": rateless,
    }
    if path.name == "config.json" and "hf" not in inner:
        return without_attempt
    other = clockless_json if path.suffix == ".json" and "hf" not in inner else Path.read_bytes
    return readers.get(path.name, other)


def without_attempt(path: Path) -> dict:
    """A run's config.json without the count of Snakemake's tries."""
    values = read_json(path)
    values["arguments"] = {k: v for k, v in values["arguments"].items() if k != "attempt"}
    return values


def rateless(path: Path) -> list[str]:
    """tables.md without columns of rates, and without the time taken."""
    lines: list[str] = []
    dropped: set[int] = set()
    for line in path.read_text().splitlines():
        cells = line.split(" | ")
        if not line.startswith("|"):
            dropped = set()
        elif not lines or not lines[-1].startswith("|"):
            dropped = {n for n, cell in enumerate(cells) if "tok/s" in cell}
        if "training time" not in line:
            lines.append(" | ".join(cell for n, cell in enumerate(cells) if n not in dropped))
    return lines


def clockless_json(path: Path) -> str:
    """JSON text, in its order, without times and rates."""
    return json.dumps(clockless(json.loads(path.read_text())))


def clockless(value: object) -> object:
    """JSON without times and rates."""
    if isinstance(value, dict):
        return {
            name: clockless(inner)
            for name, inner in value.items()
            if not name.endswith(TIMES) and not name.startswith("training time")
        }
    return [clockless(inner) for inner in value] if isinstance(value, list) else value


def broken_chain(run: Path) -> list[str]:
    """Whether an attempt began at a step that no earlier one had saved, or none was the last."""
    attempts = read_json(run / "run.json")["attempts"]
    for before, after in zip(attempts, attempts[1:], strict=False):
        if not before["from_step"] < after["from_step"] <= before["to_step"]:
            return [f"{run.name}: the attempts of run.json don't follow each other: {attempts}"]
    if attempts[-1]["end"] != "complete":
        return [f"{run.name}: its last attempt is not complete: {attempts[-1]}"]
    return []

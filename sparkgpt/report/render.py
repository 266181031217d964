"""The tables of a records folder: first as plain values (tables.json), then as Markdown.

Each row links to its records, relative to where the Markdown stands (`link`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkgpt.files import read_json
from sparkgpt.report import cells
from sparkgpt.report.matched import matched_table
from sparkgpt.report.records import Row, Run, load_runs, of_row, one_value, read_rows, rows_of

MEANS = (
    "real_tokens_per_second",
    "window_tokens_per_second",
    "utilization",
    "final_val_loss",
    "final_val_bpb",
)


@dataclass(frozen=True)
class Report:
    """What the tables of one records folder are made from."""

    runs: list[Run]
    rows: list[Row]
    comparison: dict[str, Any] | None
    coordinates: dict[str, Any] | None = None  # the record of `sparkgpt coordinates`


def load_report(
    records: Path | str, rows: Path | str | None = None, comparison: Path | str | None = None
) -> Report:
    """Read a records folder. `rows` is a runs table; `comparison` defaults to its compare.json."""
    listed = read_rows(rows) if rows else None
    runs = load_runs(records, listed)
    compared = Path(comparison or Path(records) / "compare.json")
    content = read_json(compared) if comparison or compared.is_file() else None
    check = Path(records) / "coordinates.json"
    coordinates = read_json(check) if check.is_file() else None
    return Report(runs, listed or rows_of(runs), content, coordinates)


def models(report: Report) -> list[dict[str, Any]]:
    """One entry per row: its counts, the means over its seeds, and each seed's losses."""
    return [_model(row, of_row(report.runs, row.name)) for row in report.rows]


def models_table(report: Report, link: str = "") -> str:
    """Parameters, speeds and held-out losses of each row."""
    header = ["row", "parameters", "active", "real tok/s", "window tok/s", "utilisation"]
    header += ["nats, mean", "bits, mean", "nats of each seed"]
    rows = [_model_cells(model, link) for model in models(report)]
    return cells.table(header, rows, numeric=1)


def matched(report: Report) -> str:
    """The matched runs, or that there are none."""
    if report.comparison is None:
        return f"Matched runs: {cells.NOT_MEASURED}."
    return matched_table(report.comparison)


def exports(report: Report) -> list[dict[str, Any]]:
    """One entry per run and library: the content of its check."""
    return [
        {
            "run": run.summary.run,
            "library": check.library,
            "version": check.version,
            "max_logit_difference": check.max_logit_difference,
            "greedy_equal": check.greedy_equal,
            "tokenizer_round_trips": check.tokenizer_round_trips,
            "library_val_loss": check.library_val_loss,
            "final_val_loss": check.final_val_loss,
            "ok": check.ok,
        }
        for run in report.runs
        for check in run.checks
    ]


def exports_table(report: Report, link: str = "") -> str:
    """How each export behaves in the libraries that load it."""
    header = ["run", "library", "largest logit difference", "greedy text", "round trips"]
    header += ["its held-out nats", "difference from ours", "check"]
    rows = [_export_cells(run, check, link) for run in report.runs for check in run.checks]
    if not rows:
        return f"Exports: {cells.NOT_MEASURED}."
    return cells.table(header, rows, numeric=2)


def environment(report: Report) -> dict[str, list[str]]:
    """What the runs ran on and were made from; several values when the runs differ."""
    found: dict[str, list[str]] = {}
    for run in report.runs:
        for name, value in _environment(run).items():
            values = found.setdefault(name, [])
            if value not in values:
                values.append(value)
    if report.runs:
        minutes = sum(run.summary.wall_seconds for run in report.runs) / 60
        found[f"training time of {len(report.runs)} runs"] = [f"{minutes:.1f} minutes"]
    return found


def environment_table(report: Report) -> str:
    """The environment as a two-column table."""
    found = environment(report)
    if not found:
        return f"Environment: {cells.NOT_MEASURED}."
    return cells.table(
        ["what", "value"], [[name, cells.text("; ".join(v))] for name, v in found.items()]
    )


def summary_lines(report: Report) -> str:
    """One line per row for the changelog."""
    lines = [_summary_line(model) for model in models(report)]
    for pair in (report.comparison or {}).get("pairs", []):
        lines.append(
            f"- {pair['a']} - {pair['b']}: {cells.signed(pair['mean'])} nats, 95 % interval "
            f"{cells.interval(pair['interval'])}, n = {pair['n']}: {pair['verdict']}"
        )
    return "\n".join(lines)


def _model(row: Row, runs: Sequence[Run]) -> dict[str, Any]:
    shared = {
        name: one_value(runs, name) if runs else None
        for name in ("parameters", "active_parameters")
    }
    recorded = {run.seed: run.summary for run in runs}
    each = {
        seed: {
            name: getattr(recorded[seed], name, None) if seed in recorded else None
            for name in ("run", "final_val_loss", "final_val_bpb", "weights_sha256")
        }
        for seed in dict.fromkeys([*row.seeds, *recorded])
    }
    means = {name: _mean(getattr(run.summary, name) for run in runs) for name in MEANS}
    return {"row": row.name, "label": row.label, **shared, **means, "seeds": each}


def _model_cells(model: dict[str, Any], link: str) -> list[str]:
    each = [_seed_cell(seed, values, link) for seed, values in model["seeds"].items()]
    formats: dict[str, Callable[[float | None], str]] = {
        "parameters": cells.count,
        "active_parameters": cells.count,
        "real_tokens_per_second": cells.count,
        "window_tokens_per_second": cells.count,
        "utilization": cells.percent,
        "final_val_loss": cells.nats,
        "final_val_bpb": cells.nats,
    }
    if model["parameters"] is None:
        seeds = ", ".join(f"s{seed}" for seed in model["seeds"])
        blank = [""] * (len(formats) - 1)
        return [cells.text(model["label"]), cells.NOT_MEASURED, *blank, seeds]
    figures = [form(model[name]) for name, form in formats.items()]
    return [cells.text(model["label"]), *figures, ", ".join(each)]


def _seed_cell(seed: int, values: dict[str, Any], link: str) -> str:
    if values["run"] is None:
        return f"s{seed} {cells.NOT_MEASURED}"
    return (
        f"[s{seed}]({link}runs/{values['run']}/summary.json) {cells.nats(values['final_val_loss'])}"
    )


def _export_cells(run: Run, check: Any, link: str) -> list[str]:
    both = (check.library_val_loss, check.final_val_loss)
    gap = None if None in both else abs(both[0] - both[1])
    return [
        f"[{run.summary.run}]({link}runs/{run.summary.run}/)",
        cells.text(f"{check.library} {check.version}"),
        cells.scientific(check.max_logit_difference),
        "equal" if check.greedy_equal else "differs",
        str(check.tokenizer_round_trips),
        cells.nats(check.library_val_loss),
        cells.scientific(gap),
        "passed" if check.ok else "FAILED",
    ]


def _environment(run: Run) -> dict[str, str]:
    record = run.provenance
    platform, tree = record.get("platform", {}), record.get("tree", {})
    versions = record.get("versions", {})
    state = " (with uncommitted changes)" if tree.get("dirty") else ""
    return {
        "processor": str(platform.get("cpu", "unknown")),
        "threads": str(platform.get("threads", "unknown")),
        "device": _device(record.get("device")),
        "system": " ".join(str(platform.get(k, "")) for k in ("system", "machine", "libc")).strip(),
        "libraries": ", ".join(f"{name} {versions[name]}" for name in sorted(versions)),
        "commit": cells.digest(tree.get("commit")) + state,
        "source tree": cells.digest(tree.get("hash")),
        "dependency lock": cells.digest(record.get("lock")),
        "container image": cells.digest(record.get("image")),
        "training data": cells.digest(run.summary.train_digest),
        "held-out data": f"{cells.digest(run.summary.val_digest)}, "
        f"{cells.count(run.summary.val_tokens)} tokens",
        "tokens trained on": f"{cells.count(run.summary.real_tokens)}",
    }


def _device(device: Any) -> str:
    if isinstance(device, dict):
        return str(device.get("name") or device.get("type") or "cpu")
    return str(device or "cpu")


def _summary_line(model: dict[str, Any]) -> str:
    if model["final_val_loss"] is None:
        return f"- {model['label']}: {cells.NOT_MEASURED}"
    measured = [v for v in model["seeds"].values() if v["final_val_loss"] is not None]
    seeds = f"{len(measured)} seed{'s' if len(measured) > 1 else ''}"
    return (
        f"- {model['label']}: {cells.count(model['parameters'])} parameters "
        f"({cells.count(model['active_parameters'])} active), held out "
        f"{cells.nats(model['final_val_loss'])} nats and {cells.nats(model['final_val_bpb'])} bits "
        f"per target over {seeds}, {cells.count(model['real_tokens_per_second'])} real tok/s"
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

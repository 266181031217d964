"""`sparkgpt archive VERSION`: a profile's records, tables and plots become a published version.

A version appears whole, is never overwritten, holds no path of the machine that made it, and lists
the sha256 of every file in SHA256SUMS (the format of `sha256sum -c`). It holds what is needed to
check it without this project: the pins of data and libraries, the package list, and the digests of
the weights, which themselves go beside it (`--weights`). docs/release.md tells the layout.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, replacing_directory, sha256_file, write_text
from sparkgpt.flags import Parser
from sparkgpt.image import RESULTS_SUFFIX
from sparkgpt.report import readme
from sparkgpt.report.contents import copy_pins, copy_records, copy_text
from sparkgpt.report.pack import WEIGHTS, WEIGHTS_SUMS, check_size, copy_weights, pack, weights_sums
from sparkgpt.report.records import CHECK_FILES, Row, Run, load_runs, read_rows

REQUIRED = ("compare.json", "tables.md", "index.html")


def main(argv: list[str]) -> int:
    """Publish one version. UserError when a run is incomplete, unchecked or a repetition."""
    arguments = _parser().parse_args(argv)
    if not re.fullmatch(r"v\d+(\.\d+)*", arguments.version):
        raise UserError(f"version {arguments.version!r}: write it as v0.1.0")
    target = Path(arguments.out) / arguments.version
    if target.exists() and not arguments.pack:
        raise UserError(f"{target} is already published; choose another version")
    if not target.exists():
        _publish(arguments, target)
    if arguments.pack:
        check_sums(target)
        pack(target, Path(arguments.pack))
        print(f"packed {target} as {arguments.pack}", file=sys.stderr)
    return 0


def _publish(arguments: Any, target: Path) -> None:
    records = Path(arguments.records)
    profile = records.name.removesuffix(RESULTS_SUFFIX)
    config = Path(arguments.config or f"workflow/config/{profile}.yaml")
    table = Path(arguments.rows or config.with_name(f"{config.stem}.runs.tsv"))
    rows = read_rows(table)
    runs = load_runs(records, rows)
    check_complete(records, runs, rows)
    extra = {name: source for name, source in map(_named, arguments.extra)}
    others = [run for source in extra.values() for run in load_runs(_folder(source))]
    check_different(runs, others)
    if arguments.weights:
        copy_weights([*runs, *others], Path(arguments.weights))
    with replacing_directory(target) as folder:
        copy_records(records, runs, folder)
        copy_text(table, folder / "rows.tsv")
        for name, source in extra.items():
            copy_records(source, load_runs(source), folder / "extra" / name)
            own = config.with_name(f"{config.stem}.{name}.tsv")
            if own.is_file():
                copy_text(own, folder / "extra" / name / "rows.tsv")
        for name, planned in map(_named, arguments.planned):
            copy_text(planned, folder / "extra" / name / "rows.tsv")
        copy_pins(records, runs, folder, config, Path(arguments.requirements))
        write_text(folder / WEIGHTS_SUMS, weights_sums([*runs, *others]))
        write_sums(folder)
        size = check_size(folder)
    print(f"published {len(runs)} runs as {target}, {size:,} bytes", file=sys.stderr)
    changes = Path(arguments.changes)
    if changes.is_file():
        readme.fill_entry(changes, target)
        print(f"{changes}: the figures of {arguments.version}", file=sys.stderr)
    print("next: `sparkgpt tables --write`, and commit", file=sys.stderr)


def check_complete(records: Path, runs: list[Run], rows: list[Row]) -> None:
    """UserError unless the runs are worth publishing: all there, checked, and all different."""
    if not runs:
        raise UserError(f"{records} holds no runs to publish; run the pipeline first")
    made = {(run.row, run.seed) for run in runs}
    for name, seed in [(row.name, seed) for row in rows for seed in row.seeds]:
        if (name, seed) not in made:
            raise UserError(f"{records / 'runs'} has no run {name}-s{seed}; run the pipeline first")
    for name in REQUIRED:
        if not (records / name).is_file():
            raise UserError(f"{records / name} is missing; run the pipeline to its end first")
    if not list((records / "plots").glob("*.svg")):
        raise UserError(f"{records / 'plots'} holds no plots; run the pipeline to its end first")
    for run in runs:
        _check_run(run)


def check_different(runs: list[Run], others: Sequence[Run] = ()) -> None:
    """UserError when two runs have the same weights: one of them is not what its name says.

    One of the `others`, rows beside the main table, may be one of its runs under a second name, as
    the rate that a sweep chose is: the same settings on the same data, by their fingerprints.
    """
    seen: dict[str, Run] = {}
    for run in [*runs, *others]:
        digest = run.summary.weights_sha256
        if digest is None:
            raise UserError(f"{run.path} has no weights; run it with --save-final")
        first = seen.setdefault(digest, run)
        second_name = first in runs and run in others and _same_settings(first, run)
        if first is not run and not second_name:
            raise UserError(
                f"{first.path} and {run.path} have the same weights ({digest}); "
                "one of them is not what its name says, run it again"
            )


def _same_settings(*runs: Run) -> bool:
    """Whether the records say what fixes the weights, and the same."""
    first, second = (read_json(run.path / "config.json").get("fingerprint") for run in runs)
    return first is not None and first == second


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every other file below `folder`, sorted by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{sha256_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """UserError naming the first file that SHA256SUMS does not describe, or describes otherwise."""
    text = (folder / "SHA256SUMS").read_text(encoding="utf-8")
    sums = {line[66:]: line[:64] for line in text.splitlines()}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    for name in sorted(sums.keys() | files - {"SHA256SUMS"}):
        if name not in files or sums.get(name) != sha256_file(folder / name):
            raise UserError(f"{folder / name} is not what SHA256SUMS says; restore it from git")


def _check_run(run: Run) -> None:
    for name in CHECK_FILES:
        if not (run.path / name).is_file():
            raise UserError(f"{run.path} has no {name}: its export was not checked; check it first")
    for check in run.checks:
        if not check.ok:
            raise UserError(
                f"{run.path}: its export failed the {check.library} check; not published"
            )
    read_json(run.path / "config.json")
    if run.provenance.get("weights_sha256") != run.summary.weights_sha256:
        raise UserError(
            f"{run.path}: run.json and summary.json name different weights; run it again"
        )
    weights = run.path / WEIGHTS
    if weights.is_file() and sha256_file(weights) != run.summary.weights_sha256:
        raise UserError(f"{weights} is not the file that summary.json names; run it again")
    if not run.metrics.val:
        raise UserError(f"{run.path / 'metrics.jsonl'} has no validation; run it with --val-path")


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"--extra: {path} is not a folder")
    return path


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (equals and path and re.fullmatch(r"[\w.-]+", name)):
        raise UserError(f"{text!r}: write NAME=PATH, the name of letters, digits, - and _")
    return name, Path(path)


def _parser() -> Parser:
    parser = Parser(prog="sparkgpt archive", description="Publish records, tables and plots.")
    parser.add_argument("version", help="such as v0.1.0")
    parser.add_argument("--records", default="results/cpu", help="records to publish")
    parser.add_argument("--out", default="results", help="folder of published versions")
    parser.add_argument("--rows", help="runs table (TSV) of these records (default: the profile's)")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="further records, copied to extra/NAME/",
    )
    parser.add_argument(
        "--planned",
        action="append",
        default=[],
        metavar="NAME=TSV",
        help="runs table whose rows are listed, measured or not, in extra/NAME/rows.tsv",
    )
    parser.add_argument("--config", help="the profile (default: workflow/config/<records>.yaml)")
    parser.add_argument("--requirements", default="requirements", help="folder of the lock files")
    parser.add_argument("--changes", default="CHANGES.md", help="changelog to fill, if it is there")
    parser.add_argument("--weights", metavar="DIR", help="copy all weights there, outside git")
    parser.add_argument(
        "--pack", metavar="FILE", help="the version as a .tar.gz too, also one published before"
    )
    return parser

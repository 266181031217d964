"""`sparkgpt archive VERSION`: a profile's records, tables and plots become a published version.

No weights are copied. A version appears whole, is never overwritten, holds no path of the machine
that made it, and lists the sha256 of every file in SHA256SUMS (the format of `sha256sum -c`).
"""

import re
import shutil
import sys
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, replacing_directory, sha256_file
from sparkgpt.flags import Parser
from sparkgpt.report.records import CHECK_FILES, RECORD_FILES, Row, Run, load_runs, read_rows

REPORT_FILES = ("compare.json", "tables.md", "tables.json")
# An absolute path of two or more parts that is not the tail of a word, a URL or a relative path.
ABSOLUTE = re.compile(r"(?<![\w./:~-])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
# Paths that are the same on every Linux machine say nothing about this one.
COMMON = ("/usr/", "/dev/", "/proc/", "/bin/", "/lib/", "/lib64/")


def main(argv: list[str]) -> int:
    """Publish one version. UserError when a run is incomplete, unchecked or a repetition."""
    arguments = _parser().parse_args(argv)
    if not re.fullmatch(r"v\d+(\.\d+)*", arguments.version):
        raise UserError(f"version {arguments.version!r}: write it as v0.1.0")
    target = Path(arguments.out) / arguments.version
    if target.exists():
        raise UserError(f"{target} is already published; choose another version")
    records = Path(arguments.records)
    rows = read_rows(arguments.rows) if arguments.rows else None
    runs = load_runs(records, rows)
    check_complete(records, runs, rows or [])
    with replacing_directory(target) as folder:
        _copy_main(records, runs, folder, arguments.rows)
        for name, source in map(_named, arguments.extra):
            _copy_extra(source, folder / "extra" / name)
        for name, rows in map(_named, arguments.planned):
            _copy(rows, folder / "extra" / name / "rows.tsv")
        write_sums(folder)
    print(f"published {len(runs)} runs as {target}", file=sys.stderr)
    return 0


def check_complete(records: Path, runs: list[Run], rows: list[Row]) -> None:
    """UserError unless the runs are worth publishing: all there, checked, and all different."""
    made = {(run.row, run.seed) for run in runs}
    for name, seed in [(row.name, seed) for row in rows for seed in row.seeds]:
        if (name, seed) not in made:
            raise UserError(f"{records / 'runs'} has no run {name}-s{seed}; run the pipeline first")
    if not runs:
        raise UserError(f"{records} holds no runs to publish; run the pipeline first")
    for name in REPORT_FILES[:2]:
        if not (records / name).is_file():
            raise UserError(f"{records / name} is missing; run the pipeline to its end first")
    if not list((records / "plots").glob("*.svg")):
        raise UserError(f"{records / 'plots'} holds no plots; run the pipeline to its end first")
    for run in runs:
        _check_run(run)
    check_different(runs)


def check_different(runs: list[Run]) -> None:
    """UserError when two runs have the same weights: one of them is not what its name says."""
    seen: dict[str, Run] = {}
    for run in runs:
        digest = run.summary.weights_sha256
        if digest in seen:
            raise UserError(
                f"{seen[digest].path} and {run.path} have the same weights ({digest}); "
                "one of them is not what its name says, run it again"
            )
        seen[digest] = run


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
    if run.summary.weights_sha256 is None:
        raise UserError(f"{run.path} has no weights; run it with --save-final")
    if run.provenance.get("weights_sha256") != run.summary.weights_sha256:
        raise UserError(
            f"{run.path}: run.json and summary.json name different weights; run it again"
        )
    weights = run.path / "model_final.safetensors"
    if weights.is_file() and sha256_file(weights) != run.summary.weights_sha256:
        raise UserError(f"{weights} is not the file that summary.json names; run it again")
    if not run.metrics.val:
        raise UserError(f"{run.path / 'metrics.jsonl'} has no validation; run it with --val-path")


def _copy_main(records: Path, runs: list[Run], folder: Path, rows: str | None) -> None:
    for run in runs:
        _copy_run(run.path, folder / "runs" / run.summary.run)
    for name in REPORT_FILES:
        if (records / name).is_file():
            _copy(records / name, folder / name)
    for plot in sorted((records / "plots").glob("*.svg")):
        _copy(plot, folder / "plots" / plot.name)
    if rows:
        _copy(Path(rows), folder / "rows.tsv")


def _copy_extra(source: Path, folder: Path) -> None:
    """Further records, such as a sweep: its runs, tables and plots."""
    if not source.is_dir():
        raise UserError(f"--extra: {source} is not a folder")
    for run in load_runs(source):
        _copy_run(run.path, folder / "runs" / run.summary.run)
    for pattern in ("*.json", "*.md", "*.tsv", "plots/*.svg"):
        for path in sorted(source.glob(pattern)):
            _copy(path, folder / path.relative_to(source))


def _copy_run(source: Path, folder: Path) -> None:
    for name in (*RECORD_FILES, *CHECK_FILES):
        if (source / name).is_file():
            _copy(source / name, folder / name)


def _copy(source: Path, target: Path) -> None:
    """Copy a text. Paths below the checkout become relative; any other absolute one is refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    relative = re.sub(rf"(?<![\w./:~-]){re.escape(str(Path.cwd()))}/", "", text)
    found = [path for path in ABSOLUTE.findall(relative) if not path.startswith(COMMON)]
    if found and source.suffix != ".svg":
        raise UserError(
            f"{source} holds the path {found[0]} of this machine; run inside the checkout with "
            "relative paths, then publish"
        )
    if relative == text:
        shutil.copyfile(source, target)
        return
    print(f"{source}: paths of the checkout made relative", file=sys.stderr)
    target.write_text(relative, encoding="utf-8")


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
    parser.add_argument("--rows", help="runs table (TSV) that names and orders the rows")
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
    return parser

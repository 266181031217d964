"""`sparkgpt trace ROW-OR-RUN`: from a table's row to its runs, and from each run to the tree, code,
libraries, data, container and kernels that it came from, each link checked.

A link holds, doesn't hold, or can't be checked here, because what it leads to isn't here.
"""

import functools
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import Parser
from sparkgpt.pipeline.ledger import Ledger
from sparkgpt.pipeline.profiles import check_schema
from sparkgpt.pipeline.record import read_record
from sparkgpt.pipeline.texts import read_text
from sparkgpt.pipeline.values import NO_IMAGE
from sparkgpt.report import render
from sparkgpt.report.records import Run, load_runs

WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not here to check"}


@dataclass(frozen=True)
class Link:
    """From a run (or row) to what it names; `holds` is None when that isn't here."""

    of: str
    name: str
    value: str
    where: str
    holds: bool | None


def main(argv: list[str]) -> int:
    """Print the chain. Returns 1 when a link does not hold."""
    parser = Parser(prog="sparkgpt trace", description="A row or run to everything it came from.")
    parser.add_argument("name", help="row, its label, or run, as tables name them")
    parser.add_argument("--records", metavar="DIR", help="records folder (default: results/cpu)")
    parser.add_argument("--version", metavar="V", help="published version, such as v0.1.0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.version and args.records:
        parser.error("give --records or --version, not both")
    folder = Path("results", args.version or "cpu") if not args.records else Path(args.records)
    if not (folder / "runs").is_dir():
        raise UserError(f"{folder} holds no runs; name a records folder, or --version v0.1.0")
    links = list(trace(folder, args.name))
    if args.json:
        print(json.dumps({"records": str(folder), "links": [asdict(link) for link in links]}))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(links))
    return 1 if any(link.holds is False for link in links) else 0


def trace(folder: Path, name: str) -> Iterator[Link]:
    """The links of a row or run of a records folder. UserError when it has neither, or when a
    record is damaged."""
    homes = (runs.parent for runs in folder.glob("**/runs"))
    for home in sorted(homes, key=lambda path: (len(path.parts), path)):  # the main group first
        report = render.load_report(home, _rows_table(home))
        labels = {row.label: row.name for row in report.rows}
        row = labels.get(name, name)
        runs = [run for run in load_runs(home) if name == run.summary.run or row == run.row]
        if runs:
            yield from _row_links(home, report, runs[0].row)
            for run in runs:
                yield from _run_links(home, run)
            return
    raise UserError(f"{folder} has no row or run {name!r}; see {folder / 'tables.md'}")


def _rows_table(home: Path) -> Path | None:
    """The runs table that named the rows: published with them, or an input of the tables' job."""
    read = (read_record(home / "jobs" / "tables.json") or {"inputs": {}})["inputs"]
    tables = [home / "rows.tsv", *(ROOT / name for name in read if name.endswith(".tsv"))]
    return next((path for path in tables if path.is_file()), None)


def _row_links(home: Path, report: render.Report, row: str) -> Iterator[Link]:
    """The table's row against the records, and the README's against the table."""
    models = json.loads(json.dumps(render.models(report)))  # with keys as a file has them
    made = next(entry for entry in models if entry["row"] == row)
    path = home / "tables.json"
    told = read_json(path).get("models", []) if path.is_file() else []
    losses = made["final_val_loss"]
    loss = "no loss" if losses is None else f"{losses:.4f} nats"
    yield Link(row, "table", loss, str(path), made in told if path.is_file() else None)
    document = ROOT / "README.md"
    text = read_text(document) if document.is_file() else ""
    link = re.compile(re.escape(f"]({home.as_posix()}/runs/{row}-s") + r"\d+/summary\.json")
    lines = [line for line in text.splitlines() if link.search(line)]
    rendered = render.models_table(report, f"{home.as_posix()}/").splitlines()
    holds = all(line in rendered for line in lines) if lines else None
    yield Link(row, "README", loss, str(document), holds)


def _run_links(home: Path, run: Run) -> Iterator[Link]:
    name, record = run.summary.run, run.provenance
    path = run.path / "run.json"
    check_schema(record, "run", str(path))
    weights = run.path / "model_final.safetensors"
    link = functools.partial(Link, name)
    digest = run.summary.weights_sha256
    yield link("record", str(record.get("weights_sha256")), str(path), _same(record, run))
    found = sha256_file(weights) == digest if weights.is_file() else None
    yield link("weights", str(digest), str(weights), found)
    job = home / "jobs" / f"train-{name}.json"
    made = read_record(job)
    values = made["values"] if made else {}
    yield link("job", values.get("shell", ""), str(job), _outputs_hold(run, made))
    yield from _tree_links(name, record)
    scheduled = values.get("code")
    shared = _profile_folder(home)
    ledger = Ledger.read(shared)
    code = ledger.resolved(f"train-{name}", "code", record["code"]["train"])
    yield link("scheduled code", code, str(job), code == scheduled if made else None)
    data = run.provenance["data"]
    for split in ("train", "val"):
        if data[split]:
            told = data[split]["digest"]
            manifest = shared / "data" / f"{split}.cache" / "manifest.json"
            here = read_json(manifest).get("digest") == told if manifest.is_file() else None
            asked = f"{split}={told}" in values.get("data", "").split() if made else here
            yield link(f"{split} data", told, str(manifest), here and asked)
    yield from _source_links(shared, name)
    tuned = shared / "autotune.json"
    same = sha256_file(tuned) == record["autotune"] if tuned.is_file() else None
    yield link("autotune", str(record["autotune"]), str(tuned), same)
    image = record["image"] or NO_IMAGE
    asked = ledger.resolved(f"train-{name}", "image", image) == values.get("image", NO_IMAGE)
    shown = "none, it ran on the host" if image == NO_IMAGE else image
    yield link("image", shown, str(path), asked if made else None)


def _profile_folder(home: Path) -> Path:
    """Where a group's data, ledger and autotune record lie: with the main group, a folder up in
    results, two in a version."""
    return next((up for up in (home, *home.parents[:2]) if (up / "data").is_dir()), home)


def _same(record: dict, run: Run) -> bool:
    return record.get("weights_sha256") == run.summary.weights_sha256


def _outputs_hold(run: Run, made: dict | None) -> bool | None:
    """Whether the files that the job made are still those; its paths may have moved as a whole."""
    if made is None:
        return None
    files = {run.path / Path(path).name: digest for path, digest in made["outputs"].items()}
    here = [sha256_file(path) == digest for path, digest in files.items() if path.is_file()]
    return all(here) if here else None


def _source_links(home: Path, run: str) -> Iterator[Link]:
    for path in sorted((home / "jobs").glob("fetch-*.json")):
        for name, digest in (read_record(path) or {"outputs": {}})["outputs"].items():
            file = home / "raw" / Path(name).name
            holds = sha256_file(file) == digest if file.is_file() else None
            yield Link(run, "source", digest, str(file), holds)


def _tree_links(run: str, record: dict) -> Iterator[Link]:
    """The commit, and in it the tree, the trainer's code and the pins that the record names."""
    tree, link = record["tree"], functools.partial(Link, run)
    where = f"commit {tree['commit']}"
    try:
        with _checkout(tree["commit"]) as folder:
            at = Path(folder)
            yield link("commit", str(tree["commit"]), "git", True)
            code, lock = record["code"]["train"], at / "requirements" / "base.lock.txt"
            dirty = None if tree["dirty"] else False  # a changed tree is more than its commit
            yield link("tree", str(tree["hash"]), where, _tree_hash(at) == tree["hash"] or dirty)
            yield link("code", code, where, _code(at) == code or dirty)
            same = lock.is_file() and sha256_file(lock) == record["lock"]
            yield link("lock", str(record["lock"]), where, same or dirty)
    except LookupError:
        yield link("commit", str(tree["commit"]), "git", None)
    if tree["dirty"]:
        diff, digest = tree.get("diff"), tree.get("diff_sha256")
        whole = diff is not None and hashlib.sha256(diff.encode()).hexdigest() == digest
        yield link("diff", str(digest), "run.json", whole or None)


def _checkout(commit: str | None) -> tempfile.TemporaryDirectory:
    """A folder with the files of a commit. LookupError when there is no such commit here."""
    call = ["git", "-C", str(ROOT), "archive", "--format=tar", str(commit)]
    try:
        done = subprocess.run(call, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError(commit) from error
    folder = tempfile.TemporaryDirectory(prefix="sparkgpt-trace-")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(folder.name, filter="data")
    return folder


def _tree_hash(folder: Path) -> str:
    """The hash that `provenance.tree_state` gives a checkout of exactly these files."""
    digest = hashlib.sha256()
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    for name in sorted(names):
        content = (folder / name).read_bytes()
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _code(folder: Path) -> str:
    """The trainer's code digest as that tree itself computes it."""
    call = [sys.executable, "-m", "sparkgpt.fingerprint", "train"]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True)
    return done.stdout.split("\n")[0]


def _lines(links: list[Link]) -> Iterator[str]:
    of = None
    for link in links:
        if link.of != of:
            of = link.of
            yield of
        yield f"  {link.name:15} {WORDS[link.holds]:18} {link.value[:16]:17} {link.where}"

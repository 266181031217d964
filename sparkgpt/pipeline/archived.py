"""A published version against itself: sums, records, tables, comparison, plots, weights, data.

Self-contained: it needs the folder alone, and reads its weights and data where they lie beside.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file
from sparkgpt.pipeline.ledger import Ledger
from sparkgpt.pipeline.profiles import check_schema
from sparkgpt.pipeline.record import read_record
from sparkgpt.report import compare, render, tables
from sparkgpt.report.records import Run, load_runs

SUMS = "SHA256SUMS"
WEIGHTS_SUMS = "WEIGHTS.sha256"
LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
PIN = re.compile(r"--sha256 ([0-9a-f]{64})")


def archive_failures(folder: Path) -> Iterator[str]:
    """One line per failure of a published version. UserError when `folder` is none."""
    if not (folder / SUMS).is_file():
        raise UserError(f"{folder} has no {SUMS}; give the folder of a published version")
    yield from _sum_failures(folder)
    groups = [folder, *sorted(p for p in folder.glob("extra/*") if (p / "runs").is_dir())]
    for group in groups:
        try:
            seen: dict[str, Path] = {}  # a sweep may repeat a run of the main rows
            for run in load_runs(group):
                yield from _run_failures(run, seen)
            yield from _table_failures(group)
        except UserError as error:
            yield str(error)
        if not list((group / "plots").glob("*.svg")):
            yield f"{group / 'plots'}: holds no plots"
        yield from _job_failures(group, depth=2 if group == folder else 3)
    yield from _weight_failures(folder)


def _sum_failures(folder: Path) -> Iterator[str]:
    """Every file but weights, which have sums of their own, is what SHA256SUMS says."""
    sums, wrong = read_sums(folder / SUMS)
    yield from wrong
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    found -= {SUMS} | {name for name in found if name.startswith(("weights/", "data/"))} - set(sums)
    for name in sorted(sums.keys() | found):
        if name not in found:
            yield f"{folder / name}: is not there; {SUMS} names it"
        elif name not in sums:
            yield f"{folder / name}: {SUMS} does not name it"
        elif (digest := sha256_file(folder / name)) != sums[name]:
            yield f"{folder / name}: sha256 is {digest}, {SUMS} says {sums[name]}"


def read_sums(path: Path) -> tuple[dict[str, str], list[str]]:
    """({file: sha256}, one line per line that isn't of `sha256sum`'s form)."""
    sums, wrong = {}, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = LINE.fullmatch(line)
        if match:
            sums[match[2]] = match[1]
        else:
            wrong.append(f"{path} line {number}: is not `SHA256  FILE`")
    return sums, wrong


def _run_failures(run: Run, seen: dict[str, Path]) -> Iterator[str]:
    path, digest = run.path / "run.json", run.summary.weights_sha256
    try:
        check_schema(run.provenance, "run", str(path))
    except UserError as error:
        yield str(error)
    if run.provenance.get("weights_sha256") != digest:
        yield f"{path}: weights_sha256 is not that of summary.json, {digest}"
    if digest is None or digest in seen:
        yield f"{run.path}: its weights, {digest}, are those of {seen.get(digest, 'no run')}"
    seen[str(digest)] = run.path
    data = run.provenance.get("data", {})
    for split, told in (("train", run.summary.train_digest), ("val", run.summary.val_digest)):
        if (data.get(split) or {}).get("digest") != told:
            yield f"{path}: the {split} data are not those of summary.json, {told}"
    config = read_json(run.path / "config.json").get("data")
    if config != data:
        yield f"{path}: its data are not those of config.json"


def _table_failures(group: Path) -> Iterator[str]:
    """tables.md, tables.json and compare.json, rendered again from the records beside them."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        pairs = []
        if (group / "compare.json").is_file():
            pairs = [(p["a"], p["b"]) for p in read_json(group / "compare.json")["pairs"]]
        if pairs:
            flags = [word for a, b in pairs for word in ("--pair", f"{a}:{b}")]
            with contextlib.redirect_stdout(io.StringIO()):
                compare.main(["--records", str(group), *flags, "--out", str(made / "compare.json")])
        rows = ["--rows", str(group / "rows.tsv")] if (group / "rows.tsv").is_file() else []
        report = render.load_report(group, rows[1] if rows else None)
        (made / "tables.md").write_text(tables.document(report, ""), encoding="utf-8")
        tables.main(
            ["--records", str(group), *rows]
            + ["--out", str(made / "unused.md"), "--json-out", str(made / "tables.json")]
        )
        for name in ("tables.md", "tables.json", *(["compare.json"] if pairs else [])):
            if not (group / name).is_file():
                yield f"{group / name}: is not there"
            elif (group / name).read_bytes() != (made / name).read_bytes():
                yield f"{group / name}: is not what its records give"


def _job_failures(group: Path, depth: int) -> Iterator[str]:
    """Job records against the files that were published, and fetched bytes against their pin."""
    yield from _ledger_failures(group)
    for path in sorted((group / "jobs").glob("*.json")):
        try:
            record = read_record(path)
        except UserError as error:
            yield str(error)
            continue
        for name, expected in (record["inputs"] | record["outputs"]).items():
            file = group.joinpath(*Path(name).parts[depth:])
            inside = name.startswith("results/") and file.is_file() and file != path
            if inside and (digest := sha256_file(file)) != expected:
                yield f"{file}: sha256 is {digest}, {path} says {expected}"
        pin = PIN.search(record["values"].get("source", ""))
        if pin and record["rule"] == "fetch" and set(record["outputs"].values()) != {pin[1]}:
            yield f"{path}: what was fetched is not what is pinned, {pin[1]}"


def _ledger_failures(group: Path) -> Iterator[str]:
    try:
        Ledger.read(group)
    except UserError as error:
        yield str(error)


def _weight_failures(folder: Path) -> Iterator[str]:
    """Weights that lie in `weights/`, in the version or beside it, against their runs."""
    for home in (folder / "weights", folder.parent / f"{folder.name}-weights"):
        files = {path.name: path for path in sorted(home.glob("*.safetensors"))}
        sums, wrong = {}, []
        if (home / WEIGHTS_SUMS).is_file():
            sums, wrong = read_sums(home / WEIGHTS_SUMS)
        yield from wrong
        for name in sorted(sums.keys() - files.keys()):
            yield f"{home / name}: is not there; {WEIGHTS_SUMS} names it"
        for name, path in files.items():
            digest = sha256_file(path)
            if sums and sums.get(name) != digest:
                yield f"{path}: sha256 is {digest}, {WEIGHTS_SUMS} says {sums.get(name)}"
            summaries = [folder / "runs" / path.stem / "summary.json"]
            summaries += folder.glob(f"extra/*/runs/{path.stem}/summary.json")
            told = [read_json(s)["weights_sha256"] for s in summaries if s.is_file()]
            if digest not in told:
                yield f"{path}: sha256 is {digest}, its run says {', '.join(told) or 'nothing'}"

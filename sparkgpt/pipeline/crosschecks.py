"""What a published version says in two places: pins, libraries, data, weights, and jobs' values."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file
from sparkgpt.pipeline.ledger import Ledger
from sparkgpt.pipeline.profiles import read_yaml
from sparkgpt.pipeline.record import read_record
from sparkgpt.pipeline.runs import run_failures
from sparkgpt.pipeline.texts import read_text
from sparkgpt.report.pack import WEIGHTS_SUMS, weights_sums
from sparkgpt.report.records import Run

LOCK = Path("requirements", "base.lock.txt")
DATA_RULES = ("fetch", "prepare", "cache")


def group_failures(folder: Path, group: Path, runs: list[Run]) -> Iterator[str]:
    """The values of each run's job against the run; `group` is the version or a part of it.

    UserError when a record is damaged.
    """
    ledger, digest = Ledger.read(folder), functools.cache(sha256_file)
    prefix = "" if group == folder else f"{group.name}/"
    for run in runs:
        job = f"train-{run.summary.run}"
        record = read_record(group / "jobs" / f"{job}.json")
        if record:
            yield from run_failures(run.path, record["values"], prefix + job, ledger, digest)


def version_failures(folder: Path, runs: list[Run], others: list[Run]) -> Iterator[str]:
    """What lies beside the runs of a version against them; `others` are those below `extra`.

    UserError when a file is damaged.
    """
    yield from _pin_failures(folder)
    lock = folder / LOCK
    if lock.is_file():
        digest = sha256_file(lock)
        for run in runs:
            if run.provenance.get("lock") not in (digest, None):
                yield f"{lock}: sha256 is {digest}, {run.path / 'run.json'} says another"
    for split in ("train", "val"):
        path = folder / "data" / f"{split}.cache" / "manifest.json"
        told = {getattr(run.summary, f"{split}_digest") for run in runs}
        if path.is_file() and told != {digest := read_json(path).get("digest")}:
            yield f"{path}: the digest is {digest}, the runs' summaries say another"
    sums = folder / WEIGHTS_SUMS
    if sums.is_file():
        wanted, found = weights_sums([*runs, *others]).splitlines(), read_text(sums).splitlines()
        for line in sorted(set(wanted) ^ set(found)):
            whose = "the runs' summaries" if line in found else sums.name
            yield f"{sums}: {line!r} is not in {whose}"


def _pin_failures(folder: Path) -> Iterator[str]:
    """The pins of the configuration against the records of what was fetched."""
    for path in sorted((folder / "config").glob("*.yaml")):
        values = read_yaml(path)
        try:
            sources = {
                source["file"]: source["flags"].get("sha256")
                for source in values["sources"].values()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} has no sources as a profile has; restore it") from error
        for file, pin in sources.items():
            job = folder / "jobs" / f"fetch-{file}.json"
            fetched = set((read_record(job) or {"outputs": {}})["outputs"].values())
            if pin and fetched - {pin}:
                yield f"{path}: the pin of {file} is {pin}, {job} says {', '.join(fetched)}"


def not_here(folder: Path) -> list[str]:
    """What a version names and doesn't hold: `weights` and `data`, or how many of their files."""
    runs = [path.parent.name for path in runs_below(folder)]
    weights = [any((home / f"{r}.safetensors").is_file() for home in homes(folder)) for r in runs]
    data = [file.is_file() for file in _data_files(folder)]
    return [
        f"{len(here) - sum(here)} of {len(here)} files of {name}" if any(here) else name
        for name, here in (("weights", weights), ("data", data))
        if not here or not all(here)
    ]


def _data_files(folder: Path) -> Iterator[Path]:
    """The files that the jobs of the data made, where they would lie in a version."""
    for path in sorted((folder / "jobs").glob("*.json")):
        with contextlib.suppress(UserError):  # a damaged record is told of as itself
            record = read_record(path)
            if record["rule"] in DATA_RULES:
                yield from (folder.joinpath(*Path(x).parts[2:]) for x in record["outputs"])


def runs_below(folder: Path) -> list[Path]:
    """The summaries of a version's runs, those below `extra` too."""
    return sorted(
        [*folder.glob("runs/*/summary.json"), *folder.glob("extra/*/runs/*/summary.json")]
    )


def homes(folder: Path) -> tuple[Path, Path]:
    """Where a version's weights may lie: in it or beside it."""
    return folder / "weights", folder.parent / f"{folder.name}-weights"

"""`sparkgpt verify`: every file against its record, every record against the tree, without
Snakemake and its metadata; or, with --archive, a published version against itself.

Each failure is one line that names the file and the value; what isn't here is named too.
"""

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import sha256_file
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import Parser
from sparkgpt.pipeline.archived import archive_failures
from sparkgpt.pipeline.crosschecks import not_here
from sparkgpt.pipeline.jobs import Job, Jobs
from sparkgpt.pipeline.record import read_record
from sparkgpt.pipeline.runs import run_failures
from sparkgpt.pipeline.values import NO_IMAGE
from sparkgpt.pipeline.why import add_profile_flags, all_jobs, changed_values, describe, open_jobs
from sparkgpt.report import tables


def main(argv: list[str]) -> int:
    """Print each failure. Returns 1 when there is one."""
    parser = Parser(prog="sparkgpt verify", description="Check records, files, data and tables.")
    add_profile_flags(parser)
    parser.add_argument("--archive", metavar="DIR", help="check a published version instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    absent: list[str] = []
    if args.archive:
        found, checked = archive_failures(Path(args.archive)), args.archive
    else:
        jobs = open_jobs(args)
        found, checked = tree_failures(jobs), jobs.profile.results
    failures = []
    for line in found:
        failures.append(line)
        if not args.json:
            print(line)
    if args.archive:
        absent = not_here(Path(args.archive))
    if args.json:
        print(json.dumps({"checked": checked, "failures": failures, "not_here": absent}))
    for line in absent:
        print(f"{checked}: {line}: not here, not checked", file=sys.stderr)
    whole = "all that is here is as recorded" if absent else "all is as recorded"
    verdict = f"{len(failures)} failures" if failures else whole
    print(f"{checked}: {verdict}", file=sys.stderr)
    return 1 if failures else 0


def tree_failures(jobs: Jobs) -> Iterator[str]:
    """Everything that was made for a profile, against its records, the tree and the pins."""
    digest = functools.cache(sha256_file)
    for job in all_jobs(jobs):
        try:
            record = read_record(job.record)
        except UserError as error:
            yield str(error)
            continue
        if record is None:
            yield f"{job.record}: is not there; the job {job.name} did not run"
            continue
        for change in changed_values(record["values"], job.values):
            yield f"{job.record}: {describe(change)}"
        found, asked = record.get("image") or NO_IMAGE, record["values"].get("image")
        if asked and jobs.ledger.resolved(job.name, "image", found) != asked:
            yield f"{job.record}: it ran in image {found}, its value is {asked}"
        for section in ("inputs", "outputs"):
            yield from file_failures(job.record, record[section], digest)
        if job.rule == "fetch":
            yield from _pin_failures(jobs, job, record["outputs"])
        if job.rule == "train":
            folder = job.record.parents[1] / "runs" / job.wildcards["run"]
            yield from run_failures(folder, record["values"], job.name, jobs.ledger, digest)
    yield from failures_of(lambda: _check_tables())


def file_failures(
    where: Path, digests: Mapping[str, str], digest: Callable[[str], str]
) -> Iterator[str]:
    """Files that aren't there or have another sha256 than `digests` says."""
    for path, expected in digests.items():
        if not Path(path).is_file():
            yield f"{path}: is not there; {where} names it"
        elif (found := digest(path)) != expected:
            yield f"{path}: sha256 is {found}, {where} says {expected}"


def _pin_failures(jobs: Jobs, job: Job, outputs: Mapping[str, str]) -> Iterator[str]:
    pin = jobs.sources[job.wildcards["raw"]]["flags"].get("sha256")
    for path in outputs:
        if pin and Path(path).is_file() and (found := sha256_file(path)) != pin:
            yield f"{path}: sha256 is {found}, pinned is {pin}"


def failures_of(check: Callable[[], object]) -> Iterator[str]:
    """The message of the UserError that a check raises, if it does."""
    try:
        check()
    except UserError as error:
        yield str(error)


def _check_tables() -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        tables.main(["--check", "--readme", str(ROOT / "README.md"), "--results", "results"])

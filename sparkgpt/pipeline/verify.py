"""`sparkgpt verify`: every file against its record, every record against the tree, without
Snakemake and its metadata; or, with --archive, a published version against itself.

Each failure is one line that names the file and the value.
"""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import Parser
from sparkgpt.pipeline.jobs import Job, Jobs
from sparkgpt.pipeline.profiles import check_schema, parse_flags
from sparkgpt.pipeline.record import read_record
from sparkgpt.pipeline.values import NO_IMAGE
from sparkgpt.pipeline.why import all_jobs, changed_values, describe, open_jobs
from sparkgpt.report import tables


def main(argv: list[str]) -> int:
    """Print each failure. Returns 1 when there is one."""
    parser = Parser(prog="sparkgpt verify", description="Check records, files, data and tables.")
    parser.add_argument("--profile", default="cpu", help="profile of workflow/config")
    parser.add_argument("--image", default=NO_IMAGE, help="digest of the container it runs in")
    parser.add_argument("--archive", metavar="DIR", help="check a published version instead")
    args = parser.parse_args(argv)
    if args.archive:
        from sparkgpt.pipeline.archived import archive_failures

        found, checked = archive_failures(Path(args.archive)), args.archive
    else:
        jobs = open_jobs(args.profile, args.image)
        found, checked = tree_failures(jobs), jobs.profile.results
    failures = 0
    for line in found:
        print(line)
        failures += 1
    verdict = f"{failures} failures" if failures else "all is as recorded"
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
        for section in ("inputs", "outputs"):
            yield from file_failures(job.record, record[section], digest)
        if job.rule == "fetch":
            yield from _pin_failures(jobs, job, record["outputs"])
        if job.rule == "train":
            folder = job.record.parents[1] / "runs" / job.wildcards["run"]
            accepted_as = functools.partial(jobs.ledger.resolved, job.name)
            yield from run_failures(folder, record["values"], accepted_as)
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


def run_failures(
    folder: Path, values: Mapping[str, str], accepted_as: Callable[[str, str], str]
) -> Iterator[str]:
    """A run's run.json against its schema, its summary, and the values that it was made from."""
    path = folder / "run.json"
    try:
        record, summary = read_json(path), read_json(folder / "summary.json")
        check_schema(record, "run", str(path))
    except UserError as error:
        yield str(error)
        return
    data = record["data"]
    told = {
        "weights_sha256": (record["weights_sha256"], summary["weights_sha256"]),
        "code": (accepted_as("code", record["code"]["train"]), values["code"]),
        "data": (
            f"train={data['train']['digest']} val={data['val']['digest']}" if data["val"] else "",
            values["data"],
        ),
        "flags": (_flags(record["arguments"], values["config"]), parse_flags(values["config"])),
    }
    for name, (found, expected) in told.items():
        if found != expected and accepted_as("config", values["config"]) == values["config"]:
            yield f"{path}: {name} is {found}, recorded is {expected}"


def _flags(arguments: Mapping[str, object], config: str) -> dict[str, object]:
    """The values in run.json of the flags that a job's text names, as that text writes them."""
    wanted = parse_flags(config)
    found = {}
    for name, text in wanted.items():
        value = arguments.get(name.removeprefix("no-").replace("-", "_"))
        if isinstance(value, bool):
            found[name] = value != name.startswith("no-")
        else:
            found[name] = text if _equal(value, text) else value
    return found


def _equal(value: object, text: object) -> bool:
    if isinstance(value, int | float):
        return float(value) == float(str(text))
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) == text
    return value == text


def failures_of(check: Callable[[], object]) -> Iterator[str]:
    """The message of the UserError that a check raises, if it does."""
    try:
        check()
    except UserError as error:
        yield str(error)


def _check_tables() -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        tables.main(["--check", "--readme", str(ROOT / "README.md"), "--results", "results"])

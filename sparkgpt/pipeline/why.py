"""`sparkgpt why`: the jobs that Snakemake would run, the value of each that changed, and the cost.

Decided by the job records alone, without Snakemake and its metadata: a job is stale when it has no
record, a value differs from the record's, a file that it made or read is gone, an input has other
content, or a job that it reads is stale. What depends on the data is undecided while the data are
stale: they may come out the same.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import Parser
from sparkgpt.pipeline.jobs import Job, Jobs
from sparkgpt.pipeline.profiles import MAIN, load_profile, read_profile
from sparkgpt.pipeline.record import read_record
from sparkgpt.pipeline.values import NO_IMAGE, check_digest

PART = re.compile(r", (?=[\w-]+==)| (?=--)")  # between pins, and between flags


@dataclass(frozen=True)
class Change:
    """One reason: `kind` is value, input (another content) or gone (a file; `new` is None)."""

    kind: str
    name: str
    old: str | None
    new: str | None


@dataclass
class Finding:
    """How one job stands: fresh, stale or undecided; `seconds` is what it took the last time."""

    job: Job
    record: dict | None
    changes: list[Change]
    state: str = "fresh"
    seconds: float | None = None
    before: list[str] = field(default_factory=list)  # stale or undecided jobs that it reads


def add_profile_flags(parser: Parser) -> None:
    """What tells which jobs a command is about: how the pipeline was started."""
    parser.add_argument("--profile", default="cpu", help="profile of workflow/config")
    parser.add_argument("--image", default=NO_IMAGE, help="digest of the container it runs in")
    parser.add_argument("--ranks", type=int, help="as in `snakemake --config ranks=N`")


def open_jobs(args: Namespace) -> Jobs:
    """The jobs that the flags of `add_profile_flags` name. UserError when there are none, or
    outside the checkout."""
    if Path.cwd().resolve() != ROOT:
        raise UserError(f"results are those of a checkout; run this in {ROOT}")
    if args.image != NO_IMAGE:
        check_digest(args.image, "--image")
    config = read_profile(args.profile) | {"profile": args.profile}
    if args.ranks is not None:
        config["ranks"] = args.ranks
    return Jobs(load_profile(config, contained=args.image != NO_IMAGE), args.image)


def examine(jobs: list[Job]) -> dict[str, Finding]:
    """Job name -> how it stands; each job must follow those that it reads."""
    found: dict[str, Finding] = {}
    for job in jobs:
        record = read_record(job.record)
        finding = Finding(job, record, list(_changes(job, record)), seconds=_seconds(job, record))
        gate = found.get("ready")
        undecided = job.gated and gate is not None and gate.state != "fresh"
        finding.before = [name for name in job.after if found[name].state != "fresh"]
        # Snakemake looks below the checkpoint only for what isn't there at all.
        reasons = [c for c in finding.changes if c.kind == "gone" or not undecided]
        if reasons or any(found[name].state == "stale" for name in finding.before):
            finding.state = "stale"
        elif undecided:
            finding.state = "undecided"
        found[job.name] = finding
    return found


def _changes(job: Job, record: dict | None) -> Iterator[Change]:
    if record is None:
        yield Change("gone", str(job.record), None, None)
        return
    for path, old in record["outputs"].items():
        if not Path(path).is_file():
            yield Change("gone", path, old, None)
    yield from changed_values(record["values"], job.values)
    made = job.record.stat().st_mtime
    for path, old in record["inputs"].items():
        file = Path(path)
        if not file.is_file():
            yield Change("gone", path, old, None)
        elif file.stat().st_mtime > made and (new := sha256_file(file)) != old:
            yield Change("input", path, old, new)


def changed_values(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """The values that differ between a record and now."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Change("value", name, old.get(name), new.get(name))


def _seconds(job: Job, record: dict | None) -> float | None:
    """What the job took; a run's time is that of all its attempts, which its summary adds up."""
    seconds = record["seconds"] if record else None
    summary = job.record.parents[1] / "runs" / job.wildcards.get("run", "") / "summary.json"
    if job.rule == "train" and summary.is_file():
        wall = read_json(summary).get("wall_seconds")
        if type(wall) not in (int, float):
            raise UserError(f"{summary} has no number wall_seconds; remove it to run the job")
        return max(seconds or 0.0, wall)
    return seconds


def chosen(jobs: Jobs, target: str | None) -> list[Job]:
    """The jobs of a target: a runs table, a job, a run, or a file that a job made; all by default.

    UserError when nothing is called that.
    """
    if target in (None, "all"):
        return jobs.of(MAIN)
    if target in jobs.profile.groups:
        return jobs.of(target)
    known = {name: job for group in jobs.profile.groups for name, job in _by_name(jobs, group)}
    wanted = [job for job in known.values() if _is_named(job, target)]
    if not wanted:
        raise UserError(
            f"profile {jobs.profile.name} has no job, run, runs table or file {target!r}; "
            "`sparkgpt why --json` lists its jobs"
        )
    return [job for job in known.values() if job.name in _closure(known, wanted)]


def all_jobs(jobs: Jobs) -> list[Job]:
    """The jobs of the main runs table, and of each other one of which something was made."""
    known = dict(_by_name(jobs, MAIN))
    for name, group in jobs.profile.groups.items():
        if list(Path(group.records, "jobs").glob("*.json")):
            known |= dict(_by_name(jobs, name))
    return list(known.values())


def _by_name(jobs: Jobs, group: str) -> Iterator[tuple[str, Job]]:
    return ((job.name, job) for job in jobs.of(group))


def _is_named(job: Job, target: str) -> bool:
    if target in (job.name, job.wildcards.get("run"), str(job.record)):
        return True
    record = read_record(job.record) if "/" in target else None
    return bool(record and target in record["outputs"])


def _closure(known: dict[str, Job], wanted: list[Job]) -> set[str]:
    found: set[str] = set()
    waiting = [job.name for job in wanted]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [*known[name].after, *(["ready"] if known[name].gated else [])]
    return found


def as_json(jobs: Jobs, findings: Mapping[str, Finding], target: str | None) -> dict:
    """The report of `--json`; seconds are None where no record says."""

    def entries(state: str) -> list[dict]:
        return [
            {
                "job": name,
                "rule": finding.job.rule,
                "changes": [asdict(change) for change in finding.changes],
                "after": finding.before,
                "seconds": finding.seconds,
            }
            for name, finding in findings.items()
            if finding.state == state
        ]

    stale = entries("stale")
    known = [entry["seconds"] for entry in stale if entry["seconds"] is not None]
    return {
        "profile": jobs.profile.name,
        "target": target or "all",
        "stale": stale,
        "undecided": entries("undecided"),
        "fresh": [name for name, finding in findings.items() if finding.state == "fresh"],
        "seconds": round(sum(known), 3),
        "unknown": len(stale) - len(known),
    }


def main(argv: list[str]) -> int:
    """Print what is stale and why."""
    parser = Parser(prog="sparkgpt why", description="Which jobs are stale, and what changed.")
    parser.add_argument("target", nargs="?", help="job, run, runs table or file (default: all)")
    add_profile_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    jobs = open_jobs(args)
    report = as_json(jobs, examine(chosen(jobs, args.target)), args.target)
    if args.json:
        print(json.dumps(report))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(report))
    return 0


def _lines(report: dict) -> Iterator[str]:
    for entry in report["stale"]:
        yield f"{entry['job']}: {_cost(entry['seconds'])}"
        yield from (f"  {describe(Change(**change))}" for change in entry["changes"])
        if entry["after"]:
            yield f"  after {', '.join(entry['after'])}"
    count, undecided = len(report["stale"]), report["undecided"]
    if undecided:
        changed = [entry["job"] for entry in undecided if entry["changes"]]
        yield (
            f"{len(undecided)} jobs wait for `ready`: whether their data changed is known only "
            "once it has run" + (f"; stale in any case: {', '.join(changed)}" if changed else "")
        )
    if count:
        known = f"about {report['seconds']:.0f} s" if report["unknown"] < count else ""
        unknown = f"cost unknown of {report['unknown']}" if known else "cost unknown"
        parts = [known, unknown if report["unknown"] else ""]
        yield f"{count} jobs are stale: {', '.join(part for part in parts if part)}"
    else:
        yield "nothing is stale"


def describe(change: Change) -> str:
    """One change as text: what differs of pins and flags; digests are cut to eight digits."""
    if change.kind == "gone":
        return f"{change.name} is not there"
    if change.kind == "value" and None not in (change.old, change.new):
        old, new = PART.split(change.old), PART.split(change.new)
        only = lambda those, others: ", ".join(x for x in those if x not in others) or "nothing"
        return f"{change.name}: {_short(only(old, new))} -> {_short(only(new, old))}"
    return f"{change.name}: {_short(change.old)} -> {_short(change.new)}"


def _short(text: str | None) -> str:
    if text is None:
        return "nothing"
    is_digest = len(text) in (16, 64) and not set(text) - set("0123456789abcdef")
    return text[:8] if is_digest else text


def _cost(seconds: float | None) -> str:
    return "cost unknown" if seconds is None else f"about {seconds:.3g} s"

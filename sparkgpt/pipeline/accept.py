"""`sparkgpt accept`: adopts a change that alters no result, and says so in the profile's ledger.

For each job of the profile whose code, libraries, shell text, image or training flags changed, the
new value then stands for the one in its record, for Snakemake, `why`, `verify` and the trainer
alike. A change of data, of a pin or of an input's content can't be accepted.
"""

import getpass
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_section
from sparkgpt.flags import Parser
from sparkgpt.pipeline.jobs import Job, Jobs
from sparkgpt.pipeline.ledger import COVERED, is_acceptable
from sparkgpt.pipeline.values import work_folder
from sparkgpt.pipeline.why import (
    Change,
    Finding,
    add_profile_flags,
    all_jobs,
    chosen,
    describe,
    examine,
    open_jobs,
)


def main(argv: list[str]) -> int:
    """Write one ledger entry. UserError (exit code 1) when a change is none to be accepted."""
    parser = Parser(prog="sparkgpt accept", description="Adopt a change that alters no result.")
    parser.add_argument("target", nargs="?", help="job, run, runs table or file (default: all)")
    add_profile_flags(parser)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why it alters no result")
    parser.add_argument("--by", default="", metavar="NAME", help="who says so (you)")
    args = parser.parse_args(argv)
    if not args.reason.strip():
        parser.error("--reason is empty; say why the change alters no result")
    jobs = open_jobs(args)
    findings = examine(chosen(jobs, args.target) if args.target else all_jobs(jobs))
    refused = [
        f"{name} ({describe(change)})"
        for name, finding in findings.items()
        for change in finding.changes
        if not _is_covered(finding.job, change) and change.kind != "gone"
    ]
    if refused:
        raise UserError(
            f"a change of {', '.join(COVERED)} or of training flags that no weight follows from "
            f"can be accepted, these are others: {'; '.join(refused)}; nothing was accepted; run "
            "the pipeline",
            exit_code=1,
        )
    changes = list(_adopted(jobs, findings))
    if not changes:
        print("there is no change to accept", file=sys.stderr)
        return 0
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": args.by or getpass.getuser(),
        "reason": args.reason,
        "changes": changes,
    }
    jobs.ledger.add(entry)
    for change in changes:
        shown = Change("value", change["name"], change["old"], change["new"])
        print(f"{change['job']}: {describe(shown)}")
    print(f"{len(changes)} changes accepted in {jobs.ledger.path}", file=sys.stderr)
    return 0


def _is_covered(job: Job, change: Change) -> bool:
    if change.kind != "value" or None in (change.old, change.new):
        return False
    return is_acceptable(job.name, change.name, change.old, change.new)


def _adopted(jobs: Jobs, findings: dict[str, Finding]) -> Iterator[dict[str, str]]:
    """The ledger's lines for what changed."""
    for name, finding in findings.items():
        for change in finding.changes:
            if _is_covered(finding.job, change):
                new = finding.job.raw[change.name]
                yield {"job": name, "name": change.name, "old": change.old, "new": new}
        if finding.job.rule == "train" and finding.state != "fresh":
            yield from _unfinished(jobs, finding)


def _unfinished(jobs: Jobs, finding: Finding) -> Iterator[dict[str, str]]:
    """A run that other code began: its work folder is this run's but for the code."""
    job = finding.job
    if any(change.name == "code" for change in finding.changes):
        return
    home = jobs.profile.results
    if list(Path(home).glob(f"work/{Path(work_folder(home, job.values)).name}-t*")):
        return
    for config in sorted(Path(home).glob(f"work/*/{job.wildcards['run']}/config.json")):
        old = read_section(config, "fingerprint").get("code")
        begun = work_folder(home, job.values | {"code": str(old)})
        if config.parts[-3].rpartition("-t")[0] == Path(begun).name:
            yield {"job": job.name, "name": "code", "old": str(old), "new": job.raw["code"]}
            return

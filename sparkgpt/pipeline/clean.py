"""`sparkgpt clean`: lists, and removes, the work folders that no run of a profile will resume."""

import json
import shutil
import sys
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.lock import folder_lock
from sparkgpt.pipeline.jobs import Jobs
from sparkgpt.pipeline.values import NO_IMAGE, NOT_MADE, work_folder
from sparkgpt.pipeline.why import open_jobs


def main(argv: list[str]) -> int:
    """List stale work folders with their size in bytes; with --remove, remove them."""
    parser = Parser(prog="sparkgpt clean", description="Work folders that no run will resume.")
    parser.add_argument("--profile", default="cpu", help="profile of workflow/config")
    parser.add_argument("--remove", action="store_true", help="remove them, not only list them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    jobs = open_jobs(args.profile, NO_IMAGE)
    sizes = {folder: _size(folder) for folder in stale_folders(jobs)}
    if args.remove:
        for folder in sizes:
            _remove(folder)
    if args.json:
        listed = [{"folder": str(folder), "bytes": size} for folder, size in sizes.items()]
        print(json.dumps({"stale": listed, "removed": args.remove}))
    else:
        sys.stdout.writelines(f"{size:>14,}  {folder}\n" for folder, size in sizes.items())
        done = "removed" if args.remove else "stale; --remove removes them"
        print(f"{len(sizes)} work folders {done}", file=sys.stderr)
    return 0


def stale_folders(jobs: Jobs) -> list[Path]:
    """Folders of runs that the profile's values don't name. UserError before its data are made:
    then there is no telling which would be resumed."""
    runs = [job for group in jobs.profile.groups for job in jobs.of(group) if job.rule == "train"]
    if any(job.values["data"] == NOT_MADE for job in runs):
        raise UserError(
            f"{jobs.profile.results} has no byte caches yet, so that no work folder can be told "
            "stale; run the pipeline up to `cache` first"
        )
    resumed = {
        (Path(work_folder(jobs.profile.results, job.values)).name, job.wildcards["run"])
        for job in runs
    }
    found = sorted(path for path in Path(jobs.profile.results).glob("work/*/*") if path.is_dir())
    return [p for p in found if (p.parent.name.rpartition("-t")[0], p.name) not in resumed]


def _remove(folder: Path) -> None:
    """Remove a run's work. UserError when a trainer writes it."""
    with folder_lock(folder):
        shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

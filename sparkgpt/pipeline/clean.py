"""`sparkgpt clean`: lists, and removes, the work folders that no run of a profile will resume."""

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_section
from sparkgpt.flags import Parser
from sparkgpt.lock import folder_lock
from sparkgpt.pipeline.jobs import Jobs
from sparkgpt.pipeline.profiles import split_ranks, with_ranks
from sparkgpt.pipeline.values import NOT_MADE, work_folder
from sparkgpt.pipeline.why import add_profile_flags, open_jobs


def main(argv: list[str]) -> int:
    """List stale work folders with their size in bytes; with --remove, remove them."""
    parser = Parser(prog="sparkgpt clean", description="Work folders that no run will resume.")
    add_profile_flags(parser)
    parser.add_argument("--remove", action="store_true", help="remove them, not only list them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    jobs = open_jobs(args)
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
    found = sorted(path for path in Path(jobs.profile.results).glob("work/*/*") if path.is_dir())
    values = {job.wildcards["run"]: job.values for job in runs}
    return [path for path in found if not _is_resumed(path, values.get(path.name), jobs)]


def _is_resumed(folder: Path, values: Mapping[str, str] | None, jobs: Jobs) -> bool:
    """Whether a start of the pipeline goes on in a run's folder, with as many ranks as it has."""
    if values is None:
        return False
    ranks, flags = split_ranks(values["config"])
    with suppress(UserError):  # a run that has no config.json yet, or a damaged one
        fingerprint = read_section(folder / "config.json", "fingerprint")
        ranks = int(fingerprint.get("world_size", ranks))
    own = values | {"config": with_ranks(ranks, flags)}
    kept = {Path(work_folder(jobs.profile.results, v)).name for v in (values, own)}
    return folder.parent.name.rpartition("-t")[0] in kept


def _remove(folder: Path) -> None:
    """Remove a run's work. UserError when a trainer writes it."""
    with folder_lock(folder):
        shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

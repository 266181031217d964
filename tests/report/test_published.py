"""What is committed in results/: intact, its runs all different, and the README equal to it."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from sparkgpt.report import archive, readme, tables
from sparkgpt.report.records import load_runs

ROOT = Path(__file__).parents[2]
VERSIONS = readme.versions(ROOT / "results")


def test_documents_equal_their_records(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_published_version(version):
    archive.check_sums(version)
    runs = load_runs(version)
    assert runs and all(check.ok for run in runs for check in run.checks)
    archive.check_different(runs)


def minutes(version: Path) -> str:
    """From the first job's start to the last one's end, by their records."""
    jobs = [json.loads(path.read_text()) for path in (version / "jobs").glob("*.json")]
    ends = [datetime.fromisoformat(job["finished"]).timestamp() for job in jobs]
    starts = [end - job["seconds"] for end, job in zip(ends, jobs, strict=True)]
    return f"{(max(ends) - min(starts)) / 60:.1f}"


def test_documents_say_how_long_the_pipeline_took():
    readme_text, changes = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "CHANGES.md")
    )
    assert f"version took {minutes(VERSIONS[-1])} minutes on two CPU cores" in readme_text
    before, after = (minutes(ROOT / "results" / name) for name in ("v0.3.0", "v0.4.0"))
    assert f"took {after} minutes on two cores, v0.3.0's {before}, by the records" in changes

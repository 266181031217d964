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


def test_the_readme_says_how_long_the_pipeline_took():
    jobs = [json.loads(path.read_text()) for path in (VERSIONS[-1] / "jobs").glob("*.json")]
    ends = [datetime.fromisoformat(job["finished"]).timestamp() for job in jobs]
    starts = [end - job["seconds"] for end, job in zip(ends, jobs, strict=True)]
    minutes = (max(ends) - min(starts)) / 60
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"the published version took {minutes:.1f} minutes on two CPU cores" in text

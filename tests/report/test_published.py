"""What is committed in results/: intact, its runs all different, and the README equal to it."""

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

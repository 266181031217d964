"""The summary after a start of the pipeline: what ran, what was there, what failed."""

import pytest
from synthetic import ROWS, write_run

from sparkgpt.errors import UserError
from sparkgpt.report import summary

LOG = """Building DAG of jobs...
[Mon Nov 30 02:00:01 2026]
rule train:
    input: results/cpu/data/train.cache/manifest.json
    output: {0}/runs/dense-s0/config.json, {0}/runs/dense-s0/summary.json
    jobid: 4
    reason: Params have changed since last execution
    wildcards: records=results/cpu, run=dense-s0
[Mon Nov 30 02:02:31 2026]
Finished jobid: 4 (Rule: train)
1 of 4 steps (25%) done
[Mon Nov 30 02:02:31 2026]
localrule plot:
    output: {0}/plots/loss.svg
    jobid: 7
    reason: Missing output files
[Mon Nov 30 02:02:31 2026]
localrule tables:
    output: {0}/tables.md, {0}/tables.json
    jobid: 8
[Mon Nov 30 02:02:33 2026]
Finished jobid: 8 (Rule: tables)
[Mon Nov 30 02:02:34 2026]
Error in rule plot:
    message: None
    jobid: 7
    output: {0}/plots/loss.svg
    log: results/cpu/logs/plot-loss.log (check log file(s) for error details)
"""


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "cpu"
    for row, (parameters, active, losses, experts) in ROWS.items():
        for seed, loss in losses.items():
            write_run(folder, row, seed, loss, parameters, active, experts)
    (folder / "plots").mkdir()
    (folder / "plots" / "lr.svg").write_text("<svg/>")
    (folder / "tables.md").write_text("tables")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "compare.json").write_text("{}")  # what the pipeline notes is no result
    return folder


def test_what_ran_what_was_there_and_what_failed(results):
    jobs = summary.read_log(LOG.format(results))
    assert [(job.rule, job.state, job.seconds) for job in jobs] == [
        ("train", "made", 150.0), ("plot", "failed", 0.0), ("tables", "made", 2.0),
    ]  # fmt: skip
    lines = {line[0]: line[1:] for line in summary.steps(results, jobs)}
    assert lines == {
        "step": ["made now", "reused", "failed", "time"],
        "train": ["1", "5", "", "2.5 min"],
        "check": ["", "12", "", ""],
        "tables": ["1", "", "", "2 s"],
        "plot": ["", "1", "1", "0 s"],
    }


def test_a_second_try_that_ends_well_counts(results):
    more = "[Mon Nov 30 02:03:00 2026]\nFinished jobid: 7 (Rule: plot)\n"
    jobs = summary.read_log(LOG.format(results) + more)
    assert {job.rule: job.state for job in jobs}["plot"] == "made"


def test_it_prints_steps_rows_and_places(results, tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(LOG.format(results))
    assert summary.main([str(results), "--log", str(log)]) == 0
    text = capsys.readouterr().out
    assert "| train | 1 | 5 |  | 2.5 min |" in text
    assert f"Rows in {results}" in text
    assert "| dense | 1,234,567 | 11,768 | 2.3200 | 3.3471 | 0, 1 |" in text
    assert f"failed: plot, which makes {results}/plots/loss.svg" in text
    assert f"tables: {results}/tables.md" in text and "page:" not in text


def test_without_a_log_all_was_there(results, capsys):
    summary.main([str(results)])
    assert "| train |  | 6 |  |  |" in capsys.readouterr().out


def test_missing_results(tmp_path):
    with pytest.raises(UserError, match="run the pipeline first"):
        summary.main([str(tmp_path / "nothing")])

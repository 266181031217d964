"""Records: read as they are, refused when half there or damaged, with the file's name."""

import pytest
from synthetic import edit

from sparkgpt.errors import UserError
from sparkgpt.report.records import load_run, load_runs, parse_run_name, read_rows


def test_runs_in_the_order_of_the_table(records, rows):
    runs = load_runs(records, read_rows(rows))
    names = [run.summary.run for run in runs]
    assert names == ["dense-s0", "dense-s1", "moe-s0", "moe-s1", "adamw-s0", "adamw-s1"]
    assert [check.library for check in runs[0].checks] == ["transformers", "mlx"]
    assert list(runs[0].metrics.series("val", "val/loss")) == list(range(10, 101, 10))


def test_a_table_chooses_rows_and_seeds(records, tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text("# a comment\nrow\tseeds\nmoe\t1\ndense\t\n\nmoe\t7\n")
    table = read_rows(path)
    assert [(row.name, row.label, row.seeds) for row in table] == [
        ("moe", "moe", (1, 7)),
        ("dense", "dense", ()),
    ]
    names = [run.summary.run for run in load_runs(records, table)]
    assert names == ["moe-s1", "dense-s0", "dense-s1"]


@pytest.mark.parametrize("text", ["", "name\tseeds\nmoe\t1\n", "row\tseeds\nmoe\tone\n"])
def test_wrong_tables(tmp_path, text):
    path = tmp_path / "wrong.tsv"
    path.write_text(text)
    with pytest.raises(UserError, match="wrong.tsv"):
        read_rows(path)


def test_run_names():
    assert parse_run_name("dense-s0") == ("dense", 0)
    assert parse_run_name("moe-8x2-s12") == ("moe-8x2", 12)
    assert parse_run_name("run") == ("run", None)


@pytest.mark.parametrize("name", ["summary.json", "run.json", "check_hf.json", "metrics.jsonl"])
def test_a_damaged_file_is_named(records, name):
    path = records / "runs" / "moe-s0" / name
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=f"moe-s0/{name}"):
        print(load_run(path.parent).metrics)


@pytest.mark.parametrize("name", ["summary.json", "run.json", "config.json", "metrics.jsonl"])
def test_half_a_record_is_named(records, name):
    (records / "runs" / "moe-s0" / name).unlink()
    with pytest.raises(UserError, match=rf"moe-s0 has no {name}"):
        load_runs(records)


def test_a_missing_or_mistyped_figure_is_named(records):
    path = records / "runs" / "moe-s0" / "summary.json"
    edit(path, {"parameters": "many"})
    with pytest.raises(UserError, match=r"summary.json: 'parameters' cannot be 'many'"):
        load_runs(records)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"summary.json has no 'run'"):
        load_runs(records)


def test_a_renamed_folder_is_refused(records):
    (records / "runs" / "moe-s0").rename(records / "runs" / "other-s0")
    with pytest.raises(UserError, match="belongs to run 'moe-s0'"):
        load_runs(records)


def test_the_last_line_of_a_step_counts(records):
    path = records / "runs" / "moe-s0" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "val", "step": 100, "val/loss": 9.0}\n')
    assert load_run(path.parent).metrics.series("val", "val/loss")[100] == 9.0

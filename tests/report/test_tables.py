"""Tables from records: golden text, the README's blocks, drift."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic import TORCH, edit, write_inputs, write_run

from sparkgpt.errors import UserError
from sparkgpt.report import archive, compare, plots, readme, tables

MODELS = """\
| row | parameters | active | real tok/s | window tok/s | utilisation | nats, mean | bits, mean | nats of each seed |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| dense, Muon | 1,234,567 | 1,234,567 | 11,768 | 12,050 | 97.66 % | 2.3200 | 3.3471 | [s0](runs/dense-s0/summary.json) 2.3100, [s1](runs/dense-s1/summary.json) 2.3300 |
| MoE 4x2 | 2,345,678 | 1,240,000 | 11,768 | 12,050 | 97.66 % | 2.3200 | 3.3471 | [s0](runs/moe-s0/summary.json) 2.3000, [s1](runs/moe-s1/summary.json) 2.3400 |
| dense, AdamW | 1,234,567 | 1,234,567 | 11,768 | 12,050 | 97.66 % | 2.4250 | 3.4985 | [s0](runs/adamw-s0/summary.json) 2.4100, [s1](runs/adamw-s1/summary.json) 2.4400 |
| dense 0.6B | not measured |  |  |  |  |  |  | s0, s1 |
"""  # noqa: E501

README = "# Title\n\n" + "\n".join(
    f"<!-- tables:{name}:begin -->\n<!-- tables:{name}:end -->\n" for name in tables.README_BLOCKS
)


def render(records, rows, *more):
    out = records / "tables.md"
    tables.main(["--records", str(records), "--rows", str(rows), "--out", str(out), *more])
    return out.read_text()


def publish(records, version, rows=None, *more):
    compare.main(["--records", str(records), "--pair", "dense:adamw"]
                 + ["--out", str(records / "compare.json")])  # fmt: skip
    tables.main(["--records", str(records), "--out", str(records / "tables.md")])
    plots.main(["--records", str(records), "--out", str(records / "plots"), "--only", "lr"])
    write_inputs(records)
    planned = ["--planned", f"gb10={rows}"] if rows else []
    archive.main([version, "--records", str(records), "--out", "results", *planned, *more])


def test_golden_models(records, rows):
    assert MODELS in render(records, rows)


def test_all_tables_and_their_json(records, rows):
    compare.main(["--records", str(records), "--pair", "dense:adamw"]
                 + ["--out", str(records / "compare.json")])  # fmt: skip
    text = render(records, rows, "--json-out", "tables.json")
    row = "| dense - adamw | s0 -0.1000, s1 -0.1100 | -0.1050 | [-0.1685, -0.0415] | 2 | 2 : 0 |"
    assert f"{row} dense lower |" in text
    assert "| transformers 1.2.3 | 2.5e-05 | equal | 40 | 2.3100 | 1.0e-06 | passed |" in text
    assert f"| libraries | python 3.11.9, torch {TORCH} |" in text
    assert "| training time of 6 runs | 7.0 minutes |" in text
    with open("tables.json") as file:
        values = json.load(file)
    assert [model["row"] for model in values["models"]] == ["dense", "moe", "adamw", "large"]
    assert values["models"][3]["final_val_loss"] is None
    assert values["matched"][0]["mean"] == pytest.approx(-0.105)
    assert len(values["exports"]) == 12


def test_what_differs_between_runs_is_listed_twice(records, rows):
    edit(records / "runs" / "moe-s0" / "run.json", {"versions": {"python": "3.12.1"}})
    text = render(records, rows)
    assert f"| libraries | python 3.11.9, torch {TORCH}; python 3.12.1 |" in text


def test_runs_of_other_sizes_are_not_one_row(records, rows):
    edit(records / "runs" / "dense-s1" / "summary.json", {"parameters": 5})
    with pytest.raises(UserError, match="not one row"):
        render(records, rows)


def test_links_lead_from_the_document_to_the_records(records, rows, tmp_path):
    tables.main(["--records", str(records), "--out", str(tmp_path / "docs" / "t.md")])
    assert "[s0](../made/runs/dense-s0/summary.json)" in (tmp_path / "docs" / "t.md").read_text()


def test_before_the_first_version(records, tmp_path):
    (tmp_path / "README.md").write_text(README)
    assert tables.main(["--write"]) == 0
    assert (tmp_path / "README.md").read_text().count(readme.UNPUBLISHED) == len(
        tables.README_BLOCKS
    )
    assert tables.main(["--check"]) == 0


def test_written_blocks_are_clean_and_a_changed_digit_is_drift(records, rows, tmp_path, capsys):
    publish(records, "v0.1.0", rows)
    document = tmp_path / "README.md"
    document.write_text(README + "the end\n")
    tables.main(["--write"])
    text = document.read_text()
    assert "[s0](results/v0.1.0/runs/dense-s0/summary.json) 2.3100" in text
    assert "![Training and held-out loss over tokens](results/v0.1.0/plots/loss.svg)" in text
    assert "Profile `gb10`:" in text and "| dense 0.6B | not measured |" in text
    assert text.startswith("# Title") and text.endswith("the end\n")
    assert tables.main(["--check"]) == 0
    document.write_text(text.replace("2.3200", "2.3100", 1))
    with pytest.raises(UserError, match="differs from its records in models") as error:
        tables.main(["--check"])
    assert error.value.exit_code == 1
    shown = capsys.readouterr().err
    assert "-| dense | 1,234,567" in shown and "+| dense | 1,234,567" in shown
    tables.main(["--write"])
    assert document.read_text() == text


def test_a_sweep_has_a_table_of_its_own(records, rows, tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep, "adamw-lr0.001", 0, 2.5)
    table = tmp_path / "sweep.tsv"
    table.write_text("row\tlabel\nadamw-lr0.001\trate 0.001\nadamw-lr0.002\trate 0.002\n")
    publish(records, "v0.1.0", rows, "--extra", f"sweep={sweep}", "--planned", f"sweep={table}")
    document = tmp_path / "README.md"
    document.write_text(README)
    tables.main(["--write"])
    text = document.read_text()
    link = "results/v0.1.0/extra/sweep/runs/adamw-lr0.001-s0/summary.json"
    assert text.count(f"[s0]({link}) 2.5000") == text.count("| rate 0.002 | not measured |") == 1
    assert "Profile `gb10`" in text and "Profile `sweep`" not in text
    # Without runs of its own, a later version's document may show those of an earlier one.
    shutil.copytree(tmp_path / "results/v0.1.0", tmp_path / "results/v0.2.0")
    shutil.rmtree(tmp_path / "results/v0.2.0/extra/sweep")
    document.write_text(README.replace("tables:sweep", "tables:sweep@v0.1.0"))
    tables.main(["--write"])
    text = document.read_text()
    assert text.count(f"[s0]({link}) 2.5000") == 1 and "results/v0.2.0/runs" in text
    assert tables.main(["--check"]) == 0


def test_newest_version_counts_in_numbers(tmp_path):
    for name in ("v0.9", "v0.10", "v0.2.5", "cpu", "v1.bad"):
        (tmp_path / name).mkdir()
    assert [p.name for p in readme.versions(tmp_path)] == ["v0.2.5", "v0.9", "v0.10"]
    assert readme.newest(tmp_path).name == "v0.10"


def test_changes_keep_the_figures_of_their_version(records, tmp_path):
    publish(records, "v0.1.0")
    (tmp_path / "README.md").write_text(README)
    block = "<!-- tables:summary@{0}:begin -->\n<!-- tables:summary@{0}:end -->\n"
    (tmp_path / "CHANGES.md").write_text(block.format("v0.1.0") + block.format("v0.2.0"))
    tables.main(["--write"])
    text = (tmp_path / "CHANGES.md").read_text()
    assert "- dense: 1,234,567 parameters (1,234,567 active), held out 2.3200 nats" in text
    assert text.count(readme.UNPUBLISHED) == 1
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        README.replace("<!-- tables:models:begin -->", ""),
        README.replace("<!-- tables:models:end -->", ""),
        README.replace("tables:models", "tables:other"),
        README + README,
        "nothing",
    ],
)
def test_missing_unpaired_and_unknown_markers(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(text)
    for action in ("--write", "--check"):
        with pytest.raises(UserError, match="README.md"):
            tables.main([action])
    assert (tmp_path / "README.md").read_text() == text


def test_check_is_fast_and_imports_nothing_heavy(records, tmp_path):
    publish(records, "v0.1.0")
    (tmp_path / "README.md").write_text(README)
    tables.main(["--write"])
    code = (
        "import sys; from sparkgpt.report import tables; tables.main(['--check']);"
        "print({'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(tables.__file__).parents[2])}
    call = [sys.executable, "-c", code]
    start = time.perf_counter()
    assert subprocess.check_output(call, env=environment, text=True) == "set()\n"
    assert time.perf_counter() - start < 5  # 0.2 s on an idle core

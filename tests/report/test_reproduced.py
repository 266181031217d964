"""Published against reproduced: tolerance, missing runs, speeds that are only shown."""

import json
import shutil

import pytest
from synthetic import digest, edit

from sparkgpt.errors import UserError
from sparkgpt.report import reproduced


@pytest.fixture
def here(records, tmp_path):
    """The records as version v0.1.0, and a copy of them as this machine's."""
    shutil.copytree(records, tmp_path / "results" / "v0.1.0")
    return shutil.copytree(records, tmp_path / "results" / "cpu")


def summary(here, run):
    return here / "runs" / run / "summary.json"


def test_without_a_published_version(records, capsys):
    assert reproduced.main(["--reproduced", str(records)]) == 0
    assert "no version is published in results yet" in capsys.readouterr().out


def test_equal_runs_and_speeds_only_shown(here, capsys):
    edit(summary(here, "moe-s0"), {"real_tokens_per_second": 10.0})
    edit(summary(here, "moe-s0"), {"weights_sha256": digest("other")})
    assert reproduced.main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    (row,) = (line for line in shown if line.startswith("| moe-s0 "))
    assert row == "| moe-s0 | 2.3000 | 2.3000 | +0.0000 | differ | 11,719 | 10 | reproduced |"
    assert sum("| equal |" in line for line in shown) == 5


@pytest.mark.parametrize("loss, code", [(2.399, 0), (2.201, 0), (2.401, 1), (2.199, 1)])
def test_tolerance_works_both_ways(here, loss, code):
    edit(summary(here, "moe-s0"), {"final_val_loss": loss})
    if code == 0:
        assert reproduced.main([]) == 0
        return
    with pytest.raises(UserError, match="moe-s0 differs by [+-]0.1010 nats") as error:
        reproduced.main([])
    assert error.value.exit_code == code
    assert "dense" not in str(error.value)
    assert reproduced.main(["--tolerance", "0.11"]) == 0


@pytest.mark.parametrize("loss", [float("nan"), None])
def test_no_loss_is_not_reproduced(here, loss):
    edit(summary(here, "moe-s0"), {"final_val_loss": loss})
    with pytest.raises(UserError, match="moe-s0 differs"):
        reproduced.main([])


def test_missing_runs_are_named(here, capsys):
    (here / "runs" / "dense-s1").rename(here / "runs" / "extra-s1")
    edit(summary(here, "extra-s1"), {"run": "extra-s1", "row": "extra"})
    with pytest.raises(UserError, match="dense-s1 was not run here") as error:
        reproduced.main(["--json"])
    assert error.value.exit_code == 1
    shown = capsys.readouterr()
    assert "extra-s1: not in results/v0.1.0" in shown.err
    entries = {entry["run"]: entry["ok"] for entry in json.loads(shown.out)["runs"]}
    assert [run for run, ok in entries.items() if not ok] == ["dense-s1"]


def test_other_held_out_data_is_no_reproduction(here):
    edit(summary(here, "moe-s0"), {"val_digest": digest("other")})
    with pytest.raises(UserError, match="moe-s0 was validated on other held-out data"):
        reproduced.main([])


def test_a_version_without_runs(here, tmp_path):
    (tmp_path / "results" / "v0.2.0").mkdir()
    with pytest.raises(UserError, match="v0.2.0 holds no runs"):
        reproduced.main([])

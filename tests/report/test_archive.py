"""Publishing: whole, checked, different runs; no weights; no paths of this machine."""

import json
import subprocess
from pathlib import Path

import pytest
from synthetic import digest, edit

from sparkgpt.errors import UserError
from sparkgpt.report import archive


@pytest.fixture
def complete(records):
    """Records that may be published."""
    (records / "plots").mkdir()
    (records / "plots" / "loss.svg").write_text("<svg/>")
    (records / "tables.md").write_text("tables\n")
    edit(records / "compare.json", {"pairs": []})
    return records


def publish(records, *more):
    archive.main(["v0.1.0", "--records", str(records), "--out", "results", *more])


def refused(records, match, *more):
    with pytest.raises(UserError, match=match):
        publish(records, *more)
    assert not (records.parent / "results" / "v0.1.0").exists()


def test_a_version_holds_records_and_sums_but_no_weights(complete, tmp_path):
    (complete / "runs" / "moe-s0" / "hf").mkdir()
    publish(complete)
    version = tmp_path / "results" / "v0.1.0"
    found = sorted(path.name for path in (version / "runs" / "moe-s0").iterdir())
    assert found == sorted([*archive.RECORD_FILES, *archive.CHECK_FILES])
    assert (version / "plots" / "loss.svg").is_file()
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=version, check=True)
    archive.check_sums(version)
    (version / "tables.md").write_text("other\n")
    with pytest.raises(UserError, match="tables.md"):
        archive.check_sums(version)


def test_a_version_is_never_overwritten(complete):
    publish(complete)
    with pytest.raises(UserError, match="already published"):
        publish(complete)


def test_extra_records_and_planned_rows(complete, rows, tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    edit(sweep / "sweep.json", {"best": 1e-3})
    publish(complete, "--extra", f"sweep={sweep}", "--planned", f"gb10={rows}")
    extra = tmp_path / "results" / "v0.1.0" / "extra"
    assert json.loads((extra / "sweep" / "sweep.json").read_text()) == {"best": 1e-3}
    assert (extra / "gb10" / "rows.tsv").read_text() == rows.read_text()
    assert "extra/gb10/rows.tsv" in (extra.parent / "SHA256SUMS").read_text()


def test_equal_weights_are_refused(complete):
    same = {"weights_sha256": digest("dense 0")}
    for name in ("summary.json", "run.json"):
        edit(complete / "runs" / "moe-s1" / name, same)
    refused(complete, "dense-s0 and .*moe-s1 have the same weights")


def test_a_weights_file_that_is_not_the_recorded_one_is_refused(complete):
    (complete / "runs" / "moe-s1" / "model_final.safetensors").write_bytes(b"other")
    refused(complete, "is not the file that summary.json names")


def test_a_failed_or_missing_check_is_refused(complete):
    path = complete / "runs" / "moe-s1" / "check_mlx.json"
    edit(path, {"ok": False})
    refused(complete, "failed the mlx check")
    path.unlink()
    refused(complete, "has no check_mlx.json")


def test_incomplete_records_are_refused(complete, rows, tmp_path):
    refused(complete, "no run large-s0", "--rows", str(rows))
    (complete / "compare.json").unlink()
    refused(complete, "compare.json is missing")
    with pytest.raises(UserError, match="holds no runs"):
        publish(tmp_path / "nothing")


def test_records_of_one_run_must_name_one_digest(complete):
    edit(complete / "runs" / "moe-s1" / "run.json", {"weights_sha256": digest("other")})
    refused(complete, "name different weights")


def test_paths_of_the_checkout_become_relative(complete, tmp_path, capsys):
    path = complete / "runs" / "dense-s0" / "run.json"
    edit(path, {"argv": ["sparkgpt", f"--train-path={tmp_path}/data/train.cache", f"{tmp_path}/x"]})
    publish(complete)
    text = (tmp_path / "results" / "v0.1.0" / "runs" / "dense-s0" / "run.json").read_text()
    assert json.loads(text)["argv"] == ["sparkgpt", "--train-path=data/train.cache", "x"]
    assert "dense-s0/run.json: paths of the checkout made relative" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["/home/someone/data", "--out=/srv/data/x", "see /opt/a/b.txt"])
def test_other_paths_are_refused(complete, text):
    edit(complete / "runs" / "dense-s0" / "config.json", {"arguments": {"out_dir": text}})
    refused(complete, "path /(home|srv|opt)/")


@pytest.mark.parametrize("text", ["https://example.org/a/b", "results/cpu/x", "/usr/bin/python3"])
def test_harmless_texts_pass(complete, tmp_path, text):
    config = Path("runs", "dense-s0", "config.json")
    edit(complete / config, {"arguments": {"out_dir": text}})
    publish(complete)
    published = json.loads((tmp_path / "results" / "v0.1.0" / config).read_text())
    assert published["arguments"]["out_dir"] == text


@pytest.mark.parametrize("version", ["0.1.0", "v1.x", "../v1", "v"])
def test_version_names(complete, version):
    with pytest.raises(UserError, match="write it as v0.1.0"):
        archive.main([version, "--records", str(complete)])

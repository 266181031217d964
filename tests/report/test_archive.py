"""Publishing: whole, checked, different runs; small; weights beside; no paths of this machine."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from synthetic import digest, edit, write_inputs, write_run

from sparkgpt.errors import UserError
from sparkgpt.report import archive, pack, readme
from sparkgpt.report.records import CHECK_FILES, RECORD_FILES


@pytest.fixture
def complete(records):
    """Records that may be published."""
    (records / "plots").mkdir()
    (records / "plots" / "loss.svg").write_text("<svg/>")
    (records / "tables.md").write_text("tables\n")
    edit(records / "compare.json", {"pairs": []})
    write_inputs(records)
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
    assert found == sorted([*RECORD_FILES, *CHECK_FILES])
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
        publish(tmp_path / "nothing", "--rows", str(rows))


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


def with_weights(records):
    """Give every run a weights file of its own, and its digest to its records."""
    for run in (records / "runs").iterdir():
        content = run.name.encode()
        (run / "model_final.safetensors").write_bytes(content)
        for name in ("summary.json", "run.json"):
            edit(run / name, {"weights_sha256": hashlib.sha256(content).hexdigest()})


def test_weights_go_beside_the_version(complete, tmp_path):
    with_weights(complete)
    publish(complete, "--weights", "weights")
    names = sorted(path.name for path in (complete / "runs").iterdir())
    found = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert found == sorted(["WEIGHTS.sha256", *(f"{name}.safetensors" for name in names)])
    subprocess.run(["sha256sum", "-c", "--quiet", "WEIGHTS.sha256"], cwd="weights", check=True)
    version = tmp_path / "results" / "v0.1.0"
    sums = (version / "WEIGHTS.sha256").read_bytes()
    assert sums == (tmp_path / "weights" / "WEIGHTS.sha256").read_bytes()
    assert not list(version.rglob("*.safetensors"))


def test_missing_or_changed_weights_are_refused(complete):
    refused(complete, "model_final.safetensors to copy", "--weights", "weights")


def test_equal_weights_are_refused_across_groups(complete, tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep, "other", 0, 2.3)
    for name in ("summary.json", "run.json"):
        edit(sweep / "runs/other-s0" / name, {"weights_sha256": digest("dense 0")})
    refused(complete, "dense-s0 and .*other-s0 have the same weights", "--extra", f"sweep={sweep}")


def test_a_sweep_may_hold_a_published_run_under_another_name(complete, tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep, "other", 0, 2.3)
    for name in ("summary.json", "run.json"):
        edit(sweep / "runs/other-s0" / name, {"weights_sha256": digest("dense 0")})
    edit(complete / "runs/dense-s0/config.json", {"fingerprint": {"muon_lr": 0.01}})
    edit(sweep / "runs/other-s0/config.json", {"fingerprint": {"muon_lr": 0.02}})
    refused(complete, "dense-s0 and .*other-s0 have the same weights", "--extra", f"sweep={sweep}")
    edit(sweep / "runs/other-s0/config.json", {"fingerprint": {"muon_lr": 0.01}})
    publish(complete, "--extra", f"sweep={sweep}")
    sums = (tmp_path / "results/v0.1.0/WEIGHTS.sha256").read_text().split()
    names = [sums[at + 1] for at in range(0, len(sums), 2) if sums[at] == digest("dense 0")]
    assert names == ["dense-s0.safetensors", "other-s0.safetensors"]


def in_image(records, image):
    for run in (records / "runs").iterdir():
        edit(run / "run.json", {"image": image})


def test_what_was_made_in_an_image_is_published_with_its_list(complete, tmp_path):
    image = f"sha256:{'1' * 64}"
    in_image(complete, image)
    refused(complete, f"made in {image}, and containers has no such image")
    (tmp_path / "containers").mkdir()
    for ending, text in (("digest", image), ("contents.txt", "deb a 1"), ("cdx.json", "{}")):
        (tmp_path / f"containers/cpu.{ending}").write_text(f"{text}\n")
    publish(complete)
    version = tmp_path / "results/v0.1.0"
    assert (version / "image.contents.txt").read_text() == "deb a 1\n"
    assert json.loads((version / "sbom.cdx.json").read_text()) == {}
    edit(complete / "runs/moe-s0/run.json", {"image": None})
    shutil.rmtree(version)
    refused(complete, f"made in none, {image}, .* not of one")


def test_a_version_tells_what_it_was_made_of(complete, tmp_path):
    publish(complete)
    version = tmp_path / "results" / "v0.1.0"
    assert (version / "config" / "made.yaml").is_file()
    manifest = json.loads((version / "data" / "train.cache" / "manifest.json").read_text())
    assert manifest["digest"] == digest("train")
    assert (version / "requirements" / "base.lock.txt").is_file()
    assert (version / "rows.tsv").read_text().startswith("row\tlabel")
    bill = json.loads((version / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {item["name"]: item for item in bill["components"]}
    assert set(found) == {"numpy", "torch"}  # the names in the lock files, as they are installed
    assert found["numpy"]["version"] == importlib.metadata.version("numpy")
    assert found["numpy"]["purl"] == f"pkg:pypi/numpy@{found['numpy']['version']}"


@pytest.mark.parametrize("name", ["data/val.cache/manifest.json", "data/manifest.json"])
def test_missing_pins_are_refused(complete, name):
    (complete / name).unlink()
    refused(complete, "a version needs it")


def test_data_that_changed_since_the_runs_are_refused(complete):
    edit(complete / "data/train.cache/manifest.json", {"digest": digest("newer")})
    refused(complete, "was made with other train data than")


def test_libraries_that_changed_since_the_runs_are_refused(complete):
    edit(complete / "runs" / "moe-s1" / "run.json", {"versions": {"torch": "1.0"}})
    refused(complete, "made with torch 1.0, .* is installed here")


def test_a_version_too_large_for_git_is_refused(complete, monkeypatch):
    monkeypatch.setattr(pack, "LIMIT_BYTES", 20_000)
    refused(complete, "more than the 20,000 that git should hold .largest: .*metrics.jsonl")


def test_packed_bytes_depend_on_the_content_alone(complete, tmp_path):
    publish(complete, "--pack", "a.tar.gz")
    version = tmp_path / "results" / "v0.1.0"
    for path in version.rglob("*"):
        os.utime(path, (1, 1))
    archive.main(["v0.1.0", "--out", "results", "--pack", "b.tar.gz"])  # published before
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open("a.tar.gz") as packed:
        packed.extractall("unpacked", filter="data")
        assert {entry.mtime for entry in packed} == {0}
    archive.check_sums(tmp_path / "unpacked" / "v0.1.0")
    (version / "tables.md").write_text("other")
    with pytest.raises(UserError, match="tables.md"):
        archive.main(["v0.1.0", "--out", "results", "--pack", "c.tar.gz"])


@pytest.mark.parametrize(
    "changes",
    [
        "# Changes\n\nText.\n",
        "# Changes\n\n## v0.1.0\n\n- New.\n\n## v0.0.9\n\n- Old.\n",
        "# Changes\n\n## v0.0.9\n\n- Old.\n",
        "# Changes\n\n## v0.1.0\n\n<!-- tables:summary@v0.1.0:begin -->\n"
        "<!-- tables:summary@v0.1.0:end -->\n\nNot measured: GPUs.\n",
    ],
)
def test_the_entry_of_the_changelog_gets_its_figures(complete, tmp_path, changes):
    (tmp_path / "CHANGES.md").write_text(changes)
    publish(complete)
    text = (tmp_path / "CHANGES.md").read_text()
    entry = text.partition("## v0.1.0")[2].partition("\n## ")[0]
    assert (
        entry.count("- dense: 1,234,567 parameters (1,234,567 active), held out 2.3200 nats") == 1
    )
    assert text.count("## v0.1.0") == 1
    for line in changes.splitlines():
        assert line in text
    assert tables_are_current(tmp_path)


def test_what_was_unreleased_becomes_the_version(complete, tmp_path):
    (tmp_path / "CHANGES.md").write_text("# Changes\n\n## Unreleased\n\n- new\n\n## v0.0.1\n")
    publish(complete)
    text = (tmp_path / "CHANGES.md").read_text()
    assert text.startswith("# Changes\n\n## v0.1.0\n\n- new\n\nHeld-out loss")
    assert "Unreleased" not in text and tables_are_current(tmp_path)


def tables_are_current(folder):
    _, blocks = readme.rendered(folder / "CHANGES.md", folder / "results")
    return all(current == should for current, should in blocks.values())

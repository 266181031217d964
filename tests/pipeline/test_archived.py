"""`verify --archive` on published versions, as they are and with one thing changed."""

import json
import re
import shutil

import pytest

from sparkgpt import cli
from sparkgpt.files import sha256_file
from sparkgpt.fingerprint import ROOT
from sparkgpt.report.archive import write_sums
from sparkgpt.report.readme import newest

VERSION = newest(ROOT / "results")


@pytest.fixture
def version(tmp_path):
    """The newest published version, alone in a folder."""
    folder = tmp_path / VERSION.name
    shutil.copytree(VERSION, folder)
    return folder


def failures(folder, capsys):
    code = cli.main(["verify", "--archive", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert code == bool(lines)
    return lines


def test_published_version_passes(version, capsys, monkeypatch):
    monkeypatch.chdir(version.parent)
    assert failures(version, capsys) == []


@pytest.mark.parametrize("kind", ["*.md", "*.json", "*.jsonl", "*.svg", "*.tsv", "SHA256SUMS"])
def test_any_byte_fails(kind, version, capsys):
    path = sorted(version.rglob(kind))[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert failures(version, capsys)


DIGITS = {
    "a digit of a table": ("tables.md", r"(\d\.\d\d\d)\d", "tables.md: is not what"),
    "a digit of its JSON": ("tables.json", r'("final_val_loss": \d\.\d+)\d', "tables.json: is not"),
    "a difference": ("compare.json", r'("mean": -?\d\.\d+)\d', "compare.json: is not what"),
    "a run's loss": ("runs/dense-s0/summary.json", r'("final_val_loss": \d\.\d)\d', "tables.md"),
    "a run's weights": ("runs/dense-s0/summary.json", r'("weights_sha256": ".)', "weights_sha256"),
    "a run's data": ("runs/dense-s0/run.json", r'("digest": ".)', "data are not those"),
    "a field's type": ("runs/dense-s0/run.json", r'("schema": )', "run.schema"),
}


@pytest.mark.parametrize("change", DIGITS)
def test_sums_written_anew_hide_nothing(change, version, capsys):
    name, pattern, reason = DIGITS[change]
    path = version / name
    text = path.read_text()
    path.write_text(re.sub(pattern, lambda m: f"{m[1]}7", text, count=1))
    assert path.read_text() != text
    write_sums(version)
    assert any(reason in line for line in failures(version, capsys))


def test_weights_beside_must_be_those_of_their_runs(version, capsys):
    weights = version / "weights"
    weights.mkdir()
    (weights / "dense-s0.safetensors").write_bytes(b"other weights")
    digest = sha256_file(weights / "dense-s0.safetensors")
    (weights / "WEIGHTS.sha256").write_text(f"{digest}  dense-s0.safetensors\n")
    (line,) = failures(version, capsys)
    assert "dense-s0.safetensors: sha256 is" in line
    run = version / "runs/dense-s0"
    recorded = json.loads((run / "summary.json").read_text())["weights_sha256"]
    for path in (run / "summary.json", run / "run.json", version / "WEIGHTS.sha256"):
        path.write_text(path.read_text().replace(recorded, digest))
    write_sums(version)
    assert not any("safetensors" in line for line in failures(version, capsys))
    (weights / "dense-s0.safetensors").write_bytes(b"other Weights")
    assert failures(version, capsys)


def test_two_runs_of_the_same_weights(version, capsys):
    digests = [
        json.loads((version / f"runs/{run}/summary.json").read_text())["weights_sha256"]
        for run in ("dense-s0", "dense-s1")
    ]
    for name in ("summary.json", "run.json"):
        path = version / "runs/dense-s1" / name
        path.write_text(path.read_text().replace(digests[1], digests[0]))
    assert any("are those of" in line for line in failures(version, capsys))


def test_no_version(tmp_path, capsys):
    assert cli.main(["verify", "--archive", str(tmp_path)]) == 2
    assert "has no SHA256SUMS" in capsys.readouterr().err

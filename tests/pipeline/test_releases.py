"""`verify --archive` on a version that the code itself made, changed with its sums written anew."""

import json
import shutil

import pytest

from sparkgpt import cli
from sparkgpt.files import sha256_file
from sparkgpt.report.archive import write_sums

RUN = "dense-s0"


@pytest.fixture(scope="module")
def published(built, tmp_path_factory):
    """The profile `tiny` as a version, and its records."""
    out = tmp_path_factory.mktemp("versions")
    call = ["archive", "v9.0.0", "--records", "results/tiny", "--out", str(out), "--changes", "no"]
    code, _, error = built.sparkgpt(*call)
    assert code == 0, error
    return out / "v9.0.0", built.root / "results" / "tiny"


@pytest.fixture
def version(published, tmp_path):
    folder = tmp_path / "v9.0.0"
    shutil.copytree(published[0], folder)
    return folder


def verify(folder, capsys):
    """(failures, what was said of the rest)"""
    code = cli.main(["verify", "--archive", str(folder)])
    told = capsys.readouterr()
    assert code == bool(told.out)
    return told.out.splitlines(), told.err


def test_whole_version_and_what_is_not_here(version, capsys):
    failures, told = verify(version, capsys)
    assert failures == []
    assert "weights: not here, not checked" in told and "data: " in told
    assert "all is as recorded" not in told
    assert cli.main(["verify", "--archive", str(version), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == [] and report["not_here"][0] == "weights"


def test_weights_and_sources_beside(version, published, capsys):
    records = published[1]
    (version / "weights").mkdir()
    for run in (version / "runs").iterdir():
        weights = records / "runs" / run.name / "model_final.safetensors"
        shutil.copyfile(weights, version / "weights" / f"{run.name}.safetensors")
    shutil.copytree(records / "data", version / "data", dirs_exist_ok=True)
    shutil.copytree(records / "raw", version / "raw", dirs_exist_ok=True)
    failures, told = verify(version, capsys)
    assert failures == [] and "all is as recorded" in told
    with open(version / "raw" / "documents.jsonl", "a") as file:
        file.write("more")
    lines = verify(version, capsys)[0]
    assert lines and all("raw/documents.jsonl: sha256 is" in line for line in lines)
    (version / "raw" / "other.jsonl").write_text("")
    assert any("does not name it" in line for line in verify(version, capsys)[0])


def one_flag_more(record):
    record["values"]["config"] += " --seed 9"


def other_code(record):
    record["values"]["code"] = "0" * 64


def other_data(record):
    record["values"]["data"] = record["values"]["data"].replace("val=", "val=0")


@pytest.mark.parametrize(
    "change, reason",
    [(one_flag_more, "--seed"), (other_code, "code is"), (other_data, "data is")],
)
def test_values_of_a_job_are_those_of_its_run(change, reason, version, capsys):
    path = version / "jobs" / f"train-{RUN}.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    write_sums(version)
    assert any(reason in line and RUN in line for line in verify(version, capsys)[0])


TEXTS = {
    "pin": ("config/tiny.yaml", "sha256: ", "config/tiny.yaml: the pin of documents.jsonl is"),
    "pinned libraries": ("requirements/base.lock.txt", "==", "base.lock.txt: sha256 is"),
    "digest of weights": ("WEIGHTS.sha256", "", "is not in the runs' summaries"),
    "data's digest": ("data/val.cache/manifest.json", '"digest": "', "the digest is"),
    "no pairs": ("compare.json", '"pairs": [', "its pairs name no two rows"),
    "no YAML": ("config/tiny.yaml", "checks:", "is not YAML"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_sums_written_anew_hide_nothing(name, version, capsys):
    file, before, reason = TEXTS[name]
    path = version / file
    text = path.read_text()
    place = text.index(before) + len(before)
    old = text[place]
    new = {"no pairs": "{}, " + old, "no YAML": "[" + old}.get(name, "1" if old != "1" else "2")
    path.write_text(text[:place] + new + text[place + 1 :])
    write_sums(version)
    assert any(reason in line for line in verify(version, capsys)[0])


@pytest.mark.parametrize("file", ["rows.tsv", "compare.json", "tables.md", "config/tiny.yaml"])
def test_no_utf8(file, version, capsys):
    path = version / file
    path.write_bytes(b"\xff" + path.read_bytes())
    write_sums(version)
    assert any(f"{path} is not" in line for line in verify(version, capsys)[0])


def test_sums_not_utf8(version, capsys):
    with open(version / "SHA256SUMS", "ab") as file:
        file.write(b"\xff\n")
    assert cli.main(["verify", "--archive", str(version)]) == 2
    error = capsys.readouterr().err
    assert "SHA256SUMS is not UTF-8" in error and error.count("\n") == 1


def test_weights_of_another_run(version, published, capsys):
    (version / "weights").mkdir()
    weights = published[1] / "runs" / "moe-s0" / "model_final.safetensors"
    shutil.copyfile(weights, version / "weights" / f"{RUN}.safetensors")
    (line,) = verify(version, capsys)[0]
    assert sha256_file(weights) in line


def test_run_under_an_accepted_flag(version, capsys):
    path = version / "runs" / RUN / "run.json"
    record = json.loads(path.read_text())
    assert record["arguments"]["log_every"] == 2
    record["arguments"]["log_every"] = 3
    path.write_text(json.dumps(record))
    differs = lambda: [x for x in verify(version, capsys)[0] if "flags differ: --log-every 3" in x]
    assert len(differs()) == 1
    job = f"train-{RUN}"
    old = json.loads((version / "jobs" / f"{job}.json").read_text())["values"]["config"]
    new = old.replace("--log-every 2", "--log-every 3")
    change = {"job": job, "name": "config", "old": old, "new": new}
    entry = {"when": "2030-01-01", "by": "Ada", "reason": "it logs less", "changes": [change]}
    (version / "accepted.jsonl").write_text(json.dumps(entry) + "\n")
    assert differs() == []

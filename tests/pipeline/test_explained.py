"""`why`, `accept` and `verify` in a checkout where the pipeline ran, against Snakemake itself."""

import json
import os
import re
import shutil
from collections import Counter
from contextlib import contextmanager

import pytest

from sparkgpt.files import sha256_file
from sparkgpt.pipeline.values import work_folder

RECORDS = "results/tiny"
LEDGER = f"{RECORDS}/accepted.jsonl"


@contextmanager
def changed(project, *changes):
    """Files with other content, or (None) gone; all as they were afterwards."""
    files = [project.root / path for path, _ in changes]
    before = [(path, path.read_bytes(), path.stat()) for path in files]
    for path, (_, change) in zip(files, changes, strict=True):
        if change is None:
            path.unlink()
        else:
            text = path.read_text()
            assert change(text) != text, path
            path.write_text(change(text))
    try:
        yield
    finally:
        for path, content, times in before:
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def comment(text):
    return text + "\n# edited\n"


def replaced(old, new):
    return lambda text: text.replace(old, new)


def another_loss(readme):
    """The first loss that a linked record gives, one higher in its last digit."""
    linked = re.compile(r"(?<=summary\.json\) )\d\.\d{4}")
    return linked.sub(lambda match: f"{float(match[0]) + 1e-4:.4f}", readme, count=1)


def module(name):
    return (f"sparkgpt/{name}.py", comment)


CONFIG = "workflow/config/tiny.yaml"
TABLE = "workflow/config/tiny.runs.tsv"
MUTATIONS = {
    "nothing": [],
    "every module of a kind": [module("errors")],
    "trainer": [module("train/step")],
    "export": [module("export/hf")],
    "data and export": [module("data/sources"), module("export/hf")],
    "data, and a plot gone": [module("data/sources"), (f"{RECORDS}/plots/lr.svg", None)],
    "data, and a run's record gone": [
        module("data/sources"),
        (f"{RECORDS}/runs/moe-s0/run.json", None),
    ],
    "rate": [(CONFIG, replaced("log-every: 2", "log-every: 3"))],
    "target": [(CONFIG, replaced("target-tokens: 12000", "target-tokens: 12001"))],
    "device": [(CONFIG, replaced("device: cpu", "device: cuda"))],
    "pairs": [(CONFIG, replaced("dense:moe", "moe:dense"))],
    "another seed": [(TABLE, replaced("Dense\t0", "Dense\t0,1"))],
    "a row fewer": [
        (TABLE, lambda text: text[: text.index("moe")]),
        (CONFIG, lambda text: re.sub(r"compare:\n- .*\n", "compare: []\n", text)),
    ],
    "label": [(TABLE, replaced("MoE 4x2", "MoE"))],
    "shell text": [("workflow/rules/export.smk", replaced("sparkgpt export", "sparkgpt  export"))],
    "a job's record gone": [(f"{RECORDS}/jobs/export-dense-s0.json", None)],
    "pin": [(CONFIG, lambda text: re.sub("sha256: .", "sha256: 0", text))],
}  # fmt: skip


@pytest.mark.parametrize("changes", MUTATIONS.values(), ids=MUTATIONS)
def test_why_agrees_with_snakemake(changes, built):
    with changed(built, *changes):
        planned = built.planned()
        stale = Counter(entry["rule"] for entry in built.why()["stale"])
    assert stale == planned


def test_why_names_the_value_and_the_cost(built):
    with changed(built, module("train/step"), (TABLE, replaced("num-experts 4", "num-experts 2"))):
        report = built.why("moe-s0")
        text = built.sparkgpt("why", "--profile", "tiny")[1]
    entry = next(entry for entry in report["stale"] if entry["job"] == "train-moe-s0")
    changes = {change["name"]: change for change in entry["changes"]}
    assert set(changes) == {"code", "config"}
    assert "--num-experts 4" in changes["config"]["old"]
    assert "--num-experts 2" in changes["config"]["new"]
    record = json.loads((built.root / RECORDS / "jobs/train-moe-s0.json").read_text())
    assert changes["code"]["old"] == record["values"]["code"] != changes["code"]["new"]
    summary = json.loads((built.root / RECORDS / "runs/moe-s0/summary.json").read_text())
    assert entry["seconds"] >= summary["wall_seconds"] > 0
    assert report["seconds"] >= entry["seconds"] and report["unknown"] == 0
    assert {entry["job"] for entry in report["stale"]} >= {"train-moe-s0", "export-moe-s0"}
    assert not any("dense" in entry["job"] for entry in report["stale"])
    assert re.search(r"^  code: [0-9a-f]{8} -> [0-9a-f]{8}$", text, re.M)


def test_why_says_what_waits_for_the_data(built):
    with changed(built, module("data/sources"), module("export/hf")):
        report = built.why()
        text = built.sparkgpt("why", "--profile", "tiny")[1]
    waiting = {entry["job"]: entry["changes"] for entry in report["undecided"]}
    assert waiting["train-moe-s0"] == []
    assert [change["name"] for change in waiting["export-moe-s0"]] == ["code"]
    assert "wait for `ready`" in text and "in any case: export-dense-s0" in text


def test_why_needs_no_metadata(built):
    metadata = built.root / ".snakemake" / "metadata"
    metadata.rename(metadata.with_name("away"))
    try:
        with changed(built, module("report/theme")):
            assert {entry["rule"] for entry in built.why()["stale"]} == {
                "plot",
                "page",
                "rulegraph",
            }
            assert built.planned() == {}  # Snakemake itself can't tell
    finally:
        metadata.with_name("away").rename(metadata)


def test_unknown_target_and_place(built, tmp_path):
    code, _, error = built.sparkgpt("why", "dens", "--profile", "tiny")
    assert code == 2 and "no job, run, runs table or file 'dens'" in error
    code, _, error = built.sparkgpt("why", "--profile", "big")
    assert code == 2 and "choose from" in error


@pytest.fixture
def ledger(built):
    path = built.root / LEDGER
    yield path
    path.unlink(missing_ok=True)


def test_accepted_change_runs_nothing(built, ledger):
    with changed(built, module("errors")):
        before = built.why()["stale"]
        code, output, error = built.sparkgpt(
            "accept", "--profile", "tiny", "--reason", "a comment", "--by", "Ada"
        )
        assert code == 0 and "train-dense-s0: code: " in output, error
        assert built.planned() == {} and built.why()["stale"] == []
        code, output, _ = built.sparkgpt("verify", "--profile", "tiny")
        assert code == 0, output
        (entry,) = map(json.loads, ledger.read_text().splitlines())
        assert entry["by"] == "Ada" and entry["reason"] == "a comment" and entry["when"]
        edited = {item["job"] for item in before if item["changes"]}
        assert edited <= {change["job"] for change in entry["changes"]}
        # A run that starts anew under the accepted code finds its work folder, and its record.
        run = built.root / RECORDS / "runs" / "dense-s0"
        record = json.loads((run / "run.json").read_text())
        shutil.rmtree(run)
        assert built.run(f"{RECORDS}/runs/dense-s0/run.json") == ["train"]
        assert json.loads((run / "run.json").read_text()) == record
        built.run()
        with changed(built, module("train/step")):  # another change is not accepted with it
            assert built.planned()["train"] == 2
    assert built.planned() == {}


@pytest.mark.parametrize("name", ["pin", "pairs", "label", "another seed", "target", "device"])
def test_what_alters_results_is_not_accepted(name, built, ledger):
    with changed(built, module("report/theme"), *MUTATIONS[name]):
        code, _, error = built.sparkgpt("accept", "--profile", "tiny", "--reason", "none")
    assert code == 1 and "nothing was accepted" in error and error.count("\n") == 1
    if name == "target":
        assert "train-moe-s0 (config: --target-tokens 12000 -> --target-tokens 12001)" in error
    assert not ledger.exists()


@pytest.mark.parametrize("words", [[], ["--reason", " "]])
def test_accepting_needs_a_reason(words, built, ledger):
    code, _, error = built.sparkgpt("accept", "--profile", "tiny", *words)
    assert code == 2 and "--reason" in error and not ledger.exists()


def forget(built, run):
    """Remove a run and what it would be resumed from."""
    for folder in (run, *(built.root / RECORDS / "work").glob(f"*/{run.name}")):
        shutil.rmtree(folder)


def test_run_made_anew_under_an_accepted_flag(built, ledger):
    with changed(built, *MUTATIONS["rate"]):
        call = ("accept", "--profile", "tiny", "--reason", "how often it logs")
        assert built.sparkgpt(*call)[0] == 0
        assert built.sparkgpt("verify", "--profile", "tiny")[:2] == (0, "")
        folder = built.root / RECORDS / "runs/dense-s0"
        forget(built, folder)
        assert "train" in built.run()
        record = json.loads((folder / "run.json").read_text())
        assert record["arguments"]["log_every"] == 3
        code, output, _ = built.sparkgpt("verify", "--profile", "tiny")
        assert (code, output) == (0, "")
        forget(built, folder)
        ledger.unlink()
    assert "train" in built.run()
    assert built.planned() == {}


def test_verify_hashes_weights_against_the_run_itself(built):
    weights = built.root / RECORDS / "runs/moe-s0/model_final.safetensors"
    record = weights.parents[2] / "jobs/train-moe-s0.json"
    before = [(path, path.read_bytes(), path.stat()) for path in (weights, record)]
    old = sha256_file(weights)
    flipped(weights)
    record.write_text(record.read_text().replace(old, sha256_file(weights)))
    code, output, _ = built.sparkgpt("verify", "--profile", "tiny", "--json")
    for path, content, times in before:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (line, *_) = json.loads(output)["failures"]
    assert code == 1 and "moe-s0/model_final.safetensors: sha256 is" in line and old in line


DAMAGE = {
    "run.json without code": ("runs/dense-s0/run.json", b'"code"', b'"kode"', "trace", "dense"),
    "ledger not UTF-8": ("accepted.jsonl", None, b"\xff\n", "why"),
    "ledger no object": ("accepted.jsonl", None, b"[1]\n", "why"),
    "job's value no text": ("jobs/train-dense-s0.json", b'"image": "none"', b'"image": 1', "why"),
    "manifest without digest": ("data/val.cache/manifest.json", b'"digest"', b'"d"', "why"),
    "summary without a time": (
        "runs/dense-s0/summary.json", b'"wall_seconds"', b'"wall"', "why"
    ),
    "profile not UTF-8": ("../../workflow/config/tiny.yaml", b"checks:", b"\xff:", "why"),
    "profile no YAML": ("../../workflow/config/tiny.yaml", b"checks:", b"[", "why"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_one_line(name, built, ledger):
    file, old, new, *call = DAMAGE[name]
    path = built.root / RECORDS / file
    content = path.read_bytes() if old else b""
    times = path.stat() if old else None
    assert not old or old in content
    path.write_bytes(content.replace(old, new) if old else new)
    where = ["--records", RECORDS] if call[0] == "trace" else ["--profile", "tiny"]
    code, output, error = built.sparkgpt(*call, *where)
    if old:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert code == 2 and error.startswith("sparkgpt: error: ") and error.count("\n") == 1, error
    assert path.name in error


def test_trace_of_files_that_are_not_here(built, tmp_path):
    ignored = shutil.ignore_patterns("*.safetensors", "hf", "*.bin")
    copy = tmp_path / "tiny"
    shutil.copytree(built.root / RECORDS, copy, ignore=ignored)
    path = copy / "jobs/train-moe-s0.json"
    record = json.loads(path.read_text())
    weights = {k: v for k, v in record["outputs"].items() if k.endswith(".safetensors")}
    path.write_text(json.dumps(record | {"outputs": weights}))
    _, output, error = built.sparkgpt("trace", "moe-s0", "--records", str(copy), "--json")
    links = {link["name"]: link["holds"] for link in json.loads(output)["links"]}
    assert links["job"] is None and links["weights"] is None


def flipped(path):
    """One byte of a file changed, its times kept."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "name",
    [
        "raw/documents.jsonl", "data/train.jsonl", "data/val.cache/bytes.bin", "autotune.json",
        "runs/dense-s0/model_final.safetensors", "runs/moe-s0/metrics.jsonl",
        "runs/moe-s0/run.json", "runs/moe-s0/hf/model.safetensors", "tables.md", "plots/loss.svg",
        "jobs/train-moe-s0.json",
    ],
)  # fmt: skip
def test_verify_sees_one_byte_where_times_were_kept(name, built):
    path = built.root / RECORDS / name
    content, times = path.read_bytes(), path.stat()
    flipped(path)
    try:
        code, output, _ = built.sparkgpt("verify", "--profile", "tiny")
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert code == 1 and f"{RECORDS}/{name}" in output


def test_verify_in_a_fresh_clone(built, tmp_path):
    ignored = shutil.ignore_patterns(".snakemake", "work", "__pycache__")
    clone = tmp_path / "clone"
    shutil.copytree(built.root, clone, ignore=ignored)
    project = type(built)(clone, copied=True)
    assert project.sparkgpt("verify", "--profile", "tiny")[:2] == (0, "")
    with changed(project, *MUTATIONS["pin"]):
        code, output, _ = project.sparkgpt("verify", "--profile", "tiny")
        assert code == 1 and "raw/documents.jsonl: sha256 is" in output and "pinned is" in output
    with changed(project, module("train/step")):
        code, output, _ = project.sparkgpt("verify", "--profile", "tiny")
        assert code == 1 and output.count(": code: ") == 2
    with changed(project, ("README.md", another_loss)):
        code, output, _ = project.sparkgpt("verify", "--profile", "tiny")
        assert code == 1 and "README.md differs from its records" in output


def test_trace_checks_each_link(built):
    code, output, error = built.sparkgpt("trace", "moe", "--records", RECORDS, "--json")
    assert code == 0, output + error
    links = {link["name"]: link for link in json.loads(output)["links"]}
    for name in ("table", "record", "weights", "job", "scheduled code", "train data", "source"):
        assert links[name]["holds"] is True, name
    path = built.root / RECORDS / "runs/moe-s0/model_final.safetensors"
    content = path.read_bytes()
    flipped(path)
    code, output, _ = built.sparkgpt("trace", "moe-s0", "--records", RECORDS)
    path.write_bytes(content)
    assert code == 1 and re.search("weights +DOES NOT HOLD", output)
    assert built.sparkgpt("trace", "dens", "--records", RECORDS)[0] == 2


def test_trace_of_a_run_in_another_group(built):
    group = built.root / RECORDS / "sweep"
    shutil.copytree(built.root / RECORDS / "runs/moe-s0", group / "runs/small-s0")
    for name in ("summary.json", "run.json"):
        text = (group / "runs/small-s0" / name).read_text()
        (group / "runs/small-s0" / name).write_text(text.replace('"moe', '"small'))
    try:
        _, output, error = built.sparkgpt("trace", "small", "--records", RECORDS, "--json")
    finally:
        shutil.rmtree(group)
    links = {link["name"]: link for link in json.loads(output)["links"]}
    for name in ("record", "weights", "train data", "val data", "source", "autotune"):
        assert links[name]["holds"] is True, (name, error)
    assert links["autotune"]["where"] == f"{RECORDS}/autotune.json"


@contextmanager
def edited(path, **values):
    """A record with other values, for as long as the context is open."""
    content = path.read_bytes()
    path.write_text(json.dumps(json.loads(content) | values))
    try:
        yield
    finally:
        path.write_bytes(content)


def test_verify_looks_at_the_image_of_each_record(built):
    other = f"sha256:{'1' * 64}"
    for name in ("jobs/tables.json", "jobs/train-moe-s0.json", "runs/moe-s0/run.json"):
        with edited(built.root / RECORDS / name, image=other):
            code, output, _ = built.sparkgpt("verify", "--profile", "tiny")
        lines = [line for line in output.splitlines() if other in line]
        assert code == 1 and len(lines) == 1 and name in lines[0], output
    for words in (("--image", "foo"), ("--image", "")):
        code, _, error = built.sparkgpt("verify", "--profile", "tiny", *words)
        assert code == 2 and "is no digest of an image" in error


def test_ranks_are_verified_and_never_accepted(built):
    path = built.root / RECORDS / "jobs/train-moe-s0.json"
    values = json.loads(path.read_text())["values"]
    two = values | {"config": f"ranks=2 {values['config']}"}
    with edited(path, values=two):
        code, output, error = built.sparkgpt("verify", "--profile", "tiny", "--ranks", "2")
        assert code == 1 and not error.startswith("sparkgpt: error"), error
        assert "world_size is 1, recorded is 2" in output and "moe-s0.json: config" not in output
        code, _, error = built.sparkgpt("accept", "--profile", "tiny", "--reason", "none", "moe-s0")
        assert code == 1 and "config: ranks=2" in error


def test_clean_keeps_the_work_of_other_numbers_of_ranks(built):
    values = json.loads((built.root / RECORDS / "jobs/train-moe-s0.json").read_text())["values"]
    two = values | {"config": f"ranks=2 {values['config']}"}
    folder = built.root / f"{work_folder(RECORDS, two)}-t2" / "moe-s0"
    folder.mkdir(parents=True)
    listed = lambda: built.sparkgpt("clean", "--profile", "tiny", "--json")[1]
    try:
        assert folder.parent.name in listed()
        (folder / "config.json").write_text(json.dumps({"fingerprint": {"world_size": 2}}))
        assert folder.parent.name not in listed()
    finally:
        shutil.rmtree(folder.parent)


def test_clean_lists_and_removes_what_no_run_resumes(built):
    def listed(*more):
        return json.loads(built.sparkgpt("clean", "--profile", "tiny", "--json", *more)[1])["stale"]

    assert listed() == []
    with changed(built, (TABLE, replaced("num-experts 4", "num-experts 2"))):
        (entry,) = listed()
        assert entry["folder"].endswith("/moe-s0") and entry["bytes"] > 0
        assert listed("--remove") == [entry] and listed() == []
    assert not (built.root / entry["folder"]).exists()
    assert built.planned() == {}

"""`compare --base`: both trees train, on one stream, and what results is a records folder."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.runs import write_documents

from sparkgpt.data import cache
from sparkgpt.fingerprint import ROOT

PARTS = ("requirements", "sparkgpt", "workflow")
SIZE = "--target-tokens 4000 --log-every 1"
# What the working tree has and the base has not: a step half as long, under the same flags.
EDIT = ("sparkgpt/optim/schedule.py", "return ", "return 0.5 * ")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout of two revisions: the committed one, and a working tree that trains otherwise."""
    if not shutil.which("git"):
        pytest.skip("git is not installed: apt-get install git")
    root = tmp_path_factory.mktemp("project")
    for part in PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".gitignore").write_text("results/\n__pycache__/\n")
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for call in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "base"]):
        subprocess.run([*git, *call], check=True)
    smoke = yaml.safe_load((root / "workflow/config/smoke.yaml").read_text())["train"]
    data = root / "results" / "smoke" / "data"
    data.mkdir(parents=True)
    for split, count in (("train", 200), ("val", 12)):
        source = write_documents(data / f"{split}.jsonl", count, count)
        cache.main([str(source), "--out", str(data / f"{split}.cache")])
    assert smoke["device"] == "cpu"
    return root


def compare(project, *arguments):
    call = [sys.executable, "-m", "sparkgpt", "compare", "--profile", "smoke", *arguments]
    environment = os.environ | {"PYTHONPATH": str(project)}
    done = subprocess.run(call, cwd=project, env=environment, capture_output=True, text=True)
    worktrees = ["git", "-C", str(project), "worktree", "list"]
    assert len(subprocess.check_output(worktrees, text=True).splitlines()) == 1
    return done


def replace(project, path, old, new):
    file = project / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return lambda: file.write_text(text)


@pytest.fixture(scope="module")
def compared(project):
    """The working tree's steps are half as long; two pairs."""
    restore = replace(project, *EDIT)
    done = compare(
        project, "--base", "HEAD", "dense", "--seeds", "3,5", "--threads", "2", "--flags", SIZE
        , "--out", "compared", "--json"
    )  # fmt: skip
    restore()
    assert done.returncode == 0, done.stderr
    return project / "compared", json.loads(done.stdout), done.stderr


def test_both_trees_train_and_are_told_apart(compared):
    folder, result, said = compared
    (pair,) = result["pairs"]
    assert result == json.loads((folder / "compare.json").read_text())
    assert (pair["a"], pair["b"], pair["n"]) == ("dense-here", "dense-base", 2)
    assert all(pair["losses_a"][seed] != pair["losses_b"][seed] for seed in "35")
    assert len(pair["curve"]) >= 2 and result["speed"]["n"] == 2
    assert "speed of this tree over the base" in said
    record = json.loads((folder / "run.json").read_text())
    trees = record["trees"]
    assert trees["here"]["code"] != trees["base"]["code"]
    assert trees["here"]["tree"]["dirty"] and not trees["base"]["tree"]["dirty"]
    assert trees["here"]["stream"] == trees["base"]["stream"]
    rates = [
        json.loads((folder / "runs" / f"dense-{side}-s3" / "metrics.jsonl").open().readline())
        for side in ("here", "base")
    ]
    assert rates[0]["lr/muon"] == pytest.approx(0.5 * rates[1]["lr/muon"])


def test_it_is_a_records_folder(compared):
    folder = compared[0]
    assert "this tree" in (folder / "tables.md").read_text()
    assert {path.name for path in (folder / "plots").iterdir()} >= {"matched.svg", "loss.svg"}
    seeds = {path.name for path in (folder / "runs").iterdir()}
    assert seeds == {f"dense-{side}-s{seed}" for side in ("here", "base") for seed in (3, 5)}
    order = [line.split(":")[0] for line in compared[2].splitlines() if " nats" in line]
    assert order == ["dense-base-s3", "dense-here-s3", "dense-here-s5", "dense-base-s5"]


def test_another_stream_is_refused_before_any_training(project):
    restore = replace(project, "sparkgpt/data/packing.py", "ALGORITHM = 2", "ALGORITHM = 3")
    done = compare(project, "--base", "HEAD", "dense", "--flags", SIZE, "--out", "other")
    restore()
    assert done.returncode == 2
    assert "do not train on the same stream: stream is " in done.stderr
    assert not (project / "other" / "runs").exists()


@pytest.mark.parametrize(
    "new, reason",
    [
        ("target-tokens: 4000", "as many tokens: target_tokens is 4000.0 in this tree, 60000.0"),
        ("target-tokens: 60000\n  max-train-steps: 3", "most_windows is 3 in this tree, 0"),
    ],
)
def test_other_lengths_are_refused_before_any_training(project, new, reason):
    restore = replace(project, "workflow/config/smoke.yaml", "target-tokens: 60000", new)
    done = compare(project, "--base", "HEAD", "dense", "--seeds", "0", "--out", "longer")
    restore()
    assert done.returncode == 2 and reason in done.stderr
    assert not (project / "longer" / "runs").exists()


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--base", "nothing", "dense"], "--base nothing: no such commit"),
        (["--base", "--output=x", "dense"], "expected one argument"),
        (["--base", "HEAD", "sparse"], "has no row 'sparse'; choose from dense, moe"),
        (["--base", "HEAD", "dense", "--seeds", "one"], "write whole numbers"),
        (["--base", "HEAD", "dense", "moe"], "takes one ROW"),
        (["--base", "HEAD", "dense", "--profile", "cpu"], "has no train.cache to train on"),
    ],
)
def test_mistakes_are_one_line(project, arguments, reason):
    done = compare(project, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and reason in done.stderr

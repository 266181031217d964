"""A checkout of its own for the pipeline to run in, and a profile that takes a minute."""

import copy
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparkgpt.fingerprint import ROOT

PARTS = ("Snakefile", "profiles", "requirements", "sparkgpt", "workflow")
PUBLISHED = ("README.md", "CHANGES.md", *(f"results/{p.name}" for p in ROOT.glob("results/v*")))
WORDS = "the pipeline trains a small model on whole documents and then checks every export".split()


# Run by every Python process of the first run: notes which modules of the package it imported.
SPY = """
import atexit, json, os, sys
def note():
    names = [name for name in sys.modules if name.split(".")[0] == "sparkgpt"]
    with open(os.path.join({folder!r}, f"{{os.getpid()}}.json"), "w") as file:
        json.dump([sys.orig_argv, names], file)
atexit.register(note)
"""


class Project:
    """A copied checkout, with the calls that tests make in it."""

    def __init__(self, root: Path, copied: bool = False):
        self.root = root
        for part in () if copied else (*PARTS, *PUBLISHED):
            (root / part).parent.mkdir(exist_ok=True)
            bring = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
            bring(ROOT / part, root / part)

    def snakemake(self, *arguments, profile="tiny", **variables):
        command = [sys.executable, "-m", "snakemake", *arguments, "--config", f"profile={profile}"]
        result = subprocess.run(
            command, cwd=self.root, capture_output=True, text=True, env=os.environ | variables
        )
        return result.returncode, result.stdout + result.stderr

    def run(self, *arguments, **variables):
        """Run the pipeline; returns the names of the jobs that ran."""
        code, output = self.snakemake("--cores", "2", *arguments, **variables)
        assert code == 0, output
        names = re.findall(r"^(?:local)?(?:rule|checkpoint) (\w+):", output, re.M)
        return sorted(name for name in names if name != "all")

    def planned(self, *arguments, profile="tiny"):
        """Jobs of a dry run, without targets: {rule: how many}."""
        code, output = self.snakemake("-n", *arguments, profile=profile)
        assert code == 0, output
        table = re.search(r"^job +count\n-+ +-+\n(.*?)\ntotal", output, re.M | re.S)
        found = dict(line.split() for line in table[1].splitlines()) if table else {}
        return {rule: int(count) for rule, count in found.items() if rule != "all"}

    def sparkgpt(self, *arguments):
        """Run a command of this checkout; returns (exit code, stdout, stderr)."""
        command = [sys.executable, "-m", "sparkgpt", *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def why(self, *arguments):
        """The report of `sparkgpt why --json`."""
        code, output, error = self.sparkgpt("why", *arguments, "--profile", "tiny", "--json")
        assert code == 0, error
        return json.loads(output)

    def edit(self, path, text="\n# edited\n"):
        file = self.root / path
        file.write_text(file.read_text() + text)

    def configure(self, name, **changes):
        """Write a profile derived from `smoke`."""
        folder = self.root / "workflow" / "config"
        values = yaml.safe_load((folder / "smoke.yaml").read_text()) | changes
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        shutil.copyfile(folder / "smoke.runs.tsv", folder / f"{name}.runs.tsv")


@pytest.fixture
def fresh(tmp_path):
    """A checkout in which nothing has run."""
    return Project(tmp_path)


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """A checkout in which the profile `tiny` ran from end to end; for `built` alone to copy.

    The first process of several that run tests makes it, the others wait and read, its failure too.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "untouched.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root, notes = folder / "untouched", folder / "untouched.json"
        if not notes.exists():
            root.mkdir()  # fails where another process has failed
            project = Project(root)
            documents_source(project, train={"target-tokens": 12000, "save-every": 2})
            spy = project.root / "spy"
            spy.mkdir()
            (spy / "sitecustomize.py").write_text(SPY.format(folder=str(spy)))
            jobs = project.run(PYTHONPATH=str(spy))
            imported = [json.loads(path.read_text()) for path in spy.glob("*.json")]
            notes.write_text(json.dumps([jobs, imported]))
    project = Project(root, copied=True)
    project.first_jobs, project.imported = json.loads(notes.read_text())
    return project


@pytest.fixture(scope="module")
def built(untouched, tmp_path_factory):
    """The same for each file of tests, which may change it: a copy with all times kept."""
    project = copy.copy(untouched)
    project.root = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(untouched.root, project.root)
    return project


def documents_source(project, train):
    """Configure the profile `tiny`: synthetic documents, and flags of training over those of
    `smoke`."""
    source = project.root / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    flags = {"path": source.name, "sha256": digest}
    smoke = yaml.safe_load((project.root / "workflow/config/smoke.yaml").read_text())
    project.configure(
        "tiny",
        sources={"train": {"name": "file", "file": source.name, "flags": flags}},
        prepare={"format": "jsonl", "max-document-bytes": 1023, "val-bytes": 2000, "seed": 0},
        train=smoke["train"] | train,
    )


def documents(count=60):
    """Short synthetic documents, the same each time."""
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=chance.randint(10, 120))) for _ in range(count)]

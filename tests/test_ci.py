"""The workflow file for forks runs what .ci/run runs, and nothing that the Makefile lacks."""

import re

import yaml

from sparkgpt.fingerprint import ROOT

MAKE = re.compile(r"(?:^|\s)make ([\w-]+)", re.M)


def workflow():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def steps():
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def commands():
    return "\n".join(step["run"] for step in steps() if "run" in step)


def test_it_calls_the_makefile_as_our_own_ci_does():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    ours = {name for line in lines if not line.startswith("#") for name in MAKE.findall(line)}
    assert ours and ours == set(MAKE.findall(commands()))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert ours <= set(targets)


def test_its_other_commands_are_those_of_the_environment():
    names = re.findall(r"\.venv/bin/([\w-]+)", commands())
    assert set(names) == {"snakemake", "sparkgpt"}


def test_actions_are_pinned_and_jobs_bounded():
    for step in steps():
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    for job in workflow()["jobs"].values():
        assert job["timeout-minutes"] <= 90
    assert workflow()["permissions"] == {"contents": "read"}

"""The pipeline in containers, with an apptainer that only pretends: it runs all on the host."""

import os

import pytest

DIGEST = f"sha256:{'1' * 64}"
PRETENDER = """#!/bin/bash
if [ "$1" = --version ]; then echo "apptainer version 1.4.5"; exit; fi
printf '%s\\0' "$@" "${APPTAINERENV_TRITON_HOME:-}" > "$CALLS"
exec "${@: -3}"
"""
TARGET = "results/smoke-apptainer/autotune.json"


@pytest.fixture
def apptainer(tmp_path_factory, monkeypatch):
    """The pretender, first on PATH; returns the file of its last call's words."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "apptainer").write_text(PRETENDER)
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    return folder / "calls"


def contained(project, *arguments):
    profile = ("--profile", "profiles/apptainer", "--cores", "1")
    return project.snakemake(*profile, *arguments, profile="smoke")


def build(project):
    """What containers/build leaves of a cpu image, as far as the pipeline looks at it."""
    folder = project.root / "containers"
    folder.mkdir()
    (folder / "cpu.sif").touch()
    (folder / "cpu.digest").write_text(f"{DIGEST}\n")


def test_image_that_was_not_built(fresh, apptainer):
    code, output = contained(fresh, "-n")
    assert code and "sparkgpt: error: containers/cpu.digest is not there" in output


def test_job_that_ran_outside_its_image_is_an_error(fresh, apptainer):
    build(fresh)
    code, output = contained(fresh, TARGET)
    line = f"sparkgpt: error: this runs in no image, but its job was scheduled for image {DIGEST}"
    assert code and line in output
    assert not (fresh.root / TARGET).exists() and "failed: autotune" in output
    *words, triton = apptainer.read_text().split("\0")[:-1]
    assert "--cleanenv" in words and "containers/cpu.sif" in words
    assert ".venv" not in words[-1] and "PATH=" not in words[-1]  # the image's own interpreter
    assert triton == str(fresh.root / ".cache" / "triton")


def test_gpu_profile_passes_the_driver_on(fresh, apptainer):
    build(fresh)
    fresh.snakemake("--profile", "profiles/gpu-apptainer", "-c1", TARGET, profile="smoke")
    assert "--nv" in apptainer.read_text().split("\0")


def test_containers_have_results_of_their_own(built, apptainer):
    build(built)
    assert built.planned() == {}
    inside = built.planned("--profile", "profiles/apptainer")
    assert inside["train"] == 2 and inside["fetch"] == 1
    rules = {entry["rule"] for entry in built.why("--image", DIGEST)["stale"]}
    assert {"fetch", "train", "tables"} <= rules and not built.why()["stale"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpus_share_the_cores(fresh, gpus):
    flags = ("-n", "-p", "--cores", "8", "--resources", f"gpu={gpus}")
    code, output = fresh.snakemake(*flags, profile="gpu")
    assert code == 0, output
    assert f"threads: {8 // gpus}\n" in output.split("rule train:")[1]

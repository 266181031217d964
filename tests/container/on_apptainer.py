"""What the smoke profile left when it ran in the cpu image; tests/container/run makes it first.

Not collected by `make test`: it needs apptainer and the image.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ROOT / "results" / "smoke-apptainer"
OUTSIDE = ROOT / "results" / "smoke"
CORES = os.environ.get("CORES", "all")
RUNS = ("dense-s0", "moe-s0")
# What weights depend on, as (section of run.json, key).
CAUSES = (
    ("versions", "torch"),
    ("versions", "numpy"),
    ("platform", "libc"),
    ("platform", "threads"),
    ("platform", "cpu"),
)


def snakemake(*arguments, cwd=ROOT):
    """Exit code and output of Snakemake on the smoke profile."""
    command = [sys.executable, "-m", "snakemake", "--cores", CORES, *arguments]
    done = subprocess.run(
        [*command, "--config", "profile=smoke"], cwd=cwd, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def contained(*arguments, cwd=ROOT):
    return snakemake("--profile", "profiles/apptainer", *arguments, cwd=cwd)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def digest():
    return (ROOT / "containers" / "cpu.digest").read_text().strip()


@pytest.fixture(scope="module")
def contents():
    """Lines of the image's content list, split into words."""
    text = (ROOT / "containers" / "cpu.contents.txt").read_text()
    return [line.split() for line in text.splitlines()]


@pytest.fixture(scope="module")
def outside():
    """The records of the same runs, made on the host."""
    code, output = snakemake(*(f"results/smoke/runs/{run}/run.json" for run in RUNS))
    assert code == 0, output
    return {run: read(OUTSIDE / "runs" / run / "run.json") for run in RUNS}


def test_the_digest_is_of_the_content_list(digest):
    text = (ROOT / "containers" / "cpu.contents.txt").read_bytes()
    assert digest == f"sha256:{hashlib.sha256(text).hexdigest()}"


def test_each_python_package_is_what_is_pinned(contents):
    pins = [ROOT / "requirements/base.lock.txt", ROOT / "containers/cpu.torch.txt"]
    pinned = "".join(path.read_text() for path in pins)
    packages = [words[1:] for words in contents if words[0] == "pypi"]
    assert len(packages) > 80
    for name, version, found in packages:
        if name != "pip":  # that of the distribution's own Python
            assert f"\n{name}=={version}" in f"\n{pinned}", name
            assert f"--hash={found}" in pinned, name


def test_the_sbom_lists_all_of_it(contents):
    sbom = read(ROOT / "containers" / "cpu.cdx.json")
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {
        (kind, name, version.replace("%2B", "+").replace("%3A", ":").replace("%7E", "~"))
        for item in sbom["components"]
        for kind, name, version in re.findall(
            r"pkg:(pypi|deb)/(?:[a-z]+/)?([^@]+)@([^?]+)", item.get("purl", "")
        )
        if "arch=source" not in item["purl"]
    }
    expected = {(w[0], w[1].partition(":")[0], w[2]) for w in contents if w[0] in ("pypi", "deb")}
    names = lambda found: {(kind, name.replace("%2B", "+"), v) for kind, name, v in found}
    assert names(listed) == names(expected)


def test_every_record_proves_the_image(digest):
    jobs = [read(path) for path in INSIDE.rglob("jobs/*.json")]
    runs = [read(INSIDE / "runs" / run / "run.json") for run in RUNS]
    assert len(jobs) > 20
    made = [job for job in jobs if "image" in job["values"]]
    assert {record["image"] for record in [*made, *runs]} == {digest}
    # What is fetched is the same in any image; it may have been by an earlier one.
    assert all(job["image"].startswith("sha256:") for job in jobs)


def test_it_ran_to_its_tables():
    assert "Dense" in (INSIDE / "tables.md").read_text()
    for run in RUNS:
        for check in ("check_hf.json", "check_mlx.json"):
            assert read(INSIDE / "runs" / run / check)["ok"]


def test_nothing_is_stale_inside_or_outside(outside):
    os.utime(ROOT / "containers" / "cpu.sif")  # built anew, the content is the same
    code, output = contained()
    assert code == 0 and "Nothing to be done" in output, output
    code, output = snakemake(*(f"results/smoke/runs/{run}/run.json" for run in RUNS))
    assert code == 0 and "Nothing to be done" in output, output


def test_libraries_keep_their_caches_in_one_place():
    left = {path.name for path in ROOT.glob(".*") if path.is_dir()}
    assert not left & {".config", ".triton", ".nv", ".matplotlib"}


@pytest.mark.parametrize("run", RUNS)
def test_weights_equal_those_made_outside(run, outside):
    inside = read(INSIDE / "runs" / run / "run.json")
    differing = {
        f"{section}.{key}": (inside[section][key], outside[run][section][key])
        for section, key in CAUSES
        if inside[section][key] != outside[run][section][key]
    }
    assert not {"platform.threads", "platform.cpu"} & set(differing)
    print("what differs outside:", differing or "nothing that weights depend on")
    assert outside[run]["image"] is None
    assert differing or inside["weights_sha256"] == outside[run]["weights_sha256"]


@pytest.fixture
def elsewhere(tmp_path):
    """A checkout of its own, in which nothing has run, with the same image."""
    for part in ("Snakefile", "profiles", "requirements", "sparkgpt", "workflow"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "cpu.sif").symlink_to(ROOT / "containers" / "cpu.sif")
    return tmp_path


def test_another_image_than_was_scheduled_is_an_error(elsewhere, digest):
    other = f"sha256:{'0' * 64}"
    (elsewhere / "containers" / "cpu.digest").write_text(other)
    code, output = contained("results/smoke-apptainer/autotune.json", cwd=elsewhere)
    assert code
    line = f"this runs in image {digest}, but its job was scheduled for image {other}"
    assert f"sparkgpt: error: {line}" in output
    assert not list(elsewhere.rglob("results/**/*.json"))


@pytest.mark.parametrize("target", ["cpu", "gpu", "gb10"])
def test_the_definition_parses_with_each_target(target, tmp_path):
    """apptainer gets as far as the base, which is not there."""
    values = ("bootstrap=localimage", f"from={tmp_path}/none.sif", "base=none")
    done = subprocess.run(
        ["apptainer", "build", "--build-arg-file", f"containers/{target}.args"]
        + [word for value in values for word in ("--build-arg", value)]
        + [tmp_path / "out.sif", "containers/sparkgpt.def"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode and "none.sif" in done.stderr
    assert "build var" not in done.stderr and "{{" not in done.stderr


def test_every_pin_of_the_gpu_images_can_be_had():
    """flash-attn's as well, though whether it compiles there can't be told here."""
    tools = sorted((ROOT / "containers" / ".tools").glob("*/bin/uv"))
    done = subprocess.run(
        ["containers/lock", "--check"],
        cwd=ROOT,
        env=os.environ | {"UV": str(tools[-1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

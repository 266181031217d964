"""The definition of the images, its arguments and its pins, as far as no build is needed."""

import hashlib
import importlib.util
import json
import re
import subprocess

import pytest

from sparkgpt.fingerprint import ROOT

FOLDER = ROOT / "containers"
DEFINITION = (FOLDER / "sparkgpt.def").read_text()
BUILD = (FOLDER / "build").read_text()
TARGETS = ("cpu", "gpu", "gb10")
OPTIONAL = dict(
    re.findall(r"^    (\w+)=(.*)$", DEFINITION.split("%arguments")[1].split("%files")[0], re.M)
)
GIVEN = dict.fromkeys(re.findall(r'--build-arg "(\w+)=', BUILD), "given")


def arguments(target):
    lines = (FOLDER / f"{target}.args").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def rendered(target):
    values = OPTIONAL | GIVEN | arguments(target)
    return re.sub(r"{{ (\w+) }}", lambda found: values[found[1]], DEFINITION)


def pins(path):
    """{name: (version, its hashes)} of a lock file."""
    found = re.findall(r"^([\w.-]+)==(\S+).*\\\n((?:    --hash=\S+(?: \\)?\n?)+)", path, re.M)
    return {name: (version, re.findall(r"sha256:(\w{64})", text)) for name, version, text in found}


@pytest.mark.parametrize("target", TARGETS)
def test_definition_renders(target):
    text = rendered(target)
    assert "{{" not in text
    post = text.split("%post -c /bin/bash")[1].split("\n%environment")[0]
    subprocess.run(["bash", "-n"], input=post, text=True, check=True)
    used = set(re.findall(r"{{ (\w+) }}", DEFINITION))
    assert used == OPTIONAL.keys() | GIVEN.keys() | {"target"}
    assert arguments(target).keys() <= used and arguments(target)["target"] == target


def test_every_base_is_named_by_digest():
    lines = [x for x in (FOLDER / "images.lock").read_text().splitlines() if x[0] != "#"]
    rows = [line.split("\t") for line in lines]
    assert [row[0] for row in rows] == list(TARGETS)
    for _, base, tag, release in rows:
        assert re.fullmatch(r"docker://[a-z0-9./-]+@sha256:[0-9a-f]{64}", base)
        assert tag and release


def test_profiles_name_images_that_can_be_built():
    for config in (ROOT / "workflow" / "config").glob("*.yaml"):
        image = re.search(r"^image: containers/(\w+)\.sif$", config.read_text(), re.M)
        assert image and image[1] in TARGETS, config


@pytest.mark.parametrize("target", TARGETS)
def test_torch_is_the_projects_and_every_pin_has_a_hash(target):
    wanted = re.search(r"^torch==(\S+)", (ROOT / "requirements/torch.txt").read_text(), re.M)[1]
    for path in FOLDER.glob(f"{target}.*.txt"):
        if "contents" in path.name:
            continue
        text = path.read_text()
        found = pins(text)
        assert len(found) == len(re.findall("^[a-z]", text, re.M)) and found
        assert all(hashes for _, hashes in found.values())
    assert pins((FOLDER / f"{target}.torch.txt").read_text())["torch"][0].split("+")[0] == wanted
    given = FOLDER / f"{target}.torch.in"
    assert not given.exists() or f"\ntorch=={wanted}\n" in f"\n{given.read_text()}"


def test_flash_attn_is_compiled_for_the_device_within_its_memory():
    settings = dict(word.split("=") for word in arguments("gb10")["compile_settings"].split())
    assert settings["FLASH_ATTN_CUDA_ARCHS"] == "120"
    assert settings["FLASH_ATTENTION_FORCE_BUILD"] == "TRUE"
    assert int(settings["MAX_JOBS"]) * 9 <= 128 - 40  # GB of a job, of the device, of a margin
    assert "flash-attn" in pins((FOLDER / "gb10.compiled.txt").read_text())


@pytest.mark.parametrize("target", ["", "nothing"])
def test_build_of_an_unknown_target(target):
    done = subprocess.run([FOLDER / "build", target], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cpu gpu gb10" in done.stderr


@pytest.fixture
def contents(tmp_path, monkeypatch):
    """The module that writes down an image's content, with a system of one package."""
    spec = importlib.util.spec_from_file_location("contents", FOLDER / "contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOME", tmp_path)
    listing = "installed deb bash:amd64 5.2\ndeinstall deb vim:amd64 9\n"
    done = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **options: done)
    return module


def test_contents_are_written_and_named(contents, tmp_path, monkeypatch):
    wheel = tmp_path / "a b.whl"
    wheel.write_bytes(b"wheel")
    by_index = {"url": "https://x/n.whl", "archive_info": {"hashes": {"sha256": "e" * 64}}}
    by_file = {"url": wheel.as_uri(), "archive_info": {}}
    report = tmp_path / "report"
    items = [("NumPy", by_index), ("torch", by_file)]
    report.write_text(
        json.dumps({"install": [{"metadata": {"name": n}, "download_info": d} for n, d in items]})
    )
    words = ["contents", "--target", "cpu", "--base", "a base", str(report)]
    monkeypatch.setattr("sys.argv", words)
    contents.main()
    text = (tmp_path / "contents.txt").read_text()
    lines = text.splitlines()
    assert lines == sorted(lines) and lines[0] == "base a base"
    assert "deb bash:amd64 5.2" in lines and "vim" not in text
    assert re.search(rf"^pypi numpy \S+ sha256:{'e' * 64}$", text, re.M)
    assert re.search(rf"^pypi torch \S+ sha256:{hashlib.sha256(b'wheel').hexdigest()}$", text, re.M)
    image = json.loads((tmp_path / "image.json").read_text())
    assert image == {
        "target": "cpu",
        "digest": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
        "base": "a base",
        "packages": len(lines) - 1,
    }

"""A job that was scheduled for an image refuses to run anywhere else."""

import json
import os
import subprocess
import sys

import pytest

from sparkgpt import image
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

HERE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
TRAIN = ["sparkgpt.train", "--train-path", "none.jsonl", "--target-tokens", "1000"]
RECORD = ["sparkgpt.pipeline.record", "ready.json", "--started", "0"]


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The marker file of an image that this process seems to run in."""
    path = tmp_path / "image.json"
    path.write_text(json.dumps({"digest": HERE}))
    monkeypatch.setattr(image, "MARKER", path)
    return path


def test_in_the_image_that_was_asked_for(marker, monkeypatch):
    monkeypatch.setenv(image.EXPECTED, HERE)
    image.check_image()
    assert image.image_digest() == HERE


def test_in_an_image_without_being_asked(marker, monkeypatch):
    monkeypatch.delenv(image.EXPECTED, raising=False)
    image.check_image()


def test_in_another_image(marker, monkeypatch):
    monkeypatch.setenv(image.EXPECTED, OTHER)
    with pytest.raises(UserError, match=f"in image {HERE}, but .* for image {OTHER}"):
        image.check_image()


def test_on_the_host(marker, monkeypatch):
    marker.unlink()
    assert image.image_digest() is None
    monkeypatch.setenv(image.EXPECTED, OTHER)
    with pytest.raises(UserError, match="runs in no image"):
        image.check_image()


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"digest": null}'])
def test_damaged_marker(text, marker):
    marker.write_text(text)
    with pytest.raises(UserError, match="build this image again"):
        image.image_digest()


def test_no_expectation_is_met_by_an_empty_one(marker, monkeypatch):
    monkeypatch.setenv(image.EXPECTED, "")
    with pytest.raises(UserError, match=f"runs in image {HERE}"):
        image.check_image()


@pytest.mark.parametrize("command", [["sparkgpt", "tables"], TRAIN, RECORD], ids=lambda c: c[0])
def test_every_entry_refuses(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=os.environ | {image.EXPECTED: OTHER, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    line = f"sparkgpt: error: this runs in no image, but its job was scheduled for image {OTHER}"
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_caches_of_a_container_lie_in_the_work_directory():
    settings = image.cache_settings("/checkout")
    assert settings["APPTAINERENV_TRITON_HOME"] == "/checkout/.cache/triton"
    assert all(value.startswith("/checkout/.cache") for value in settings.values())

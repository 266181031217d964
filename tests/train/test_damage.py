"""Damage that keeps size and times is found all the same, and nothing of another run is lost."""

import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
from helpers.runs import flags, weights

from sparkgpt.cli import main as cli
from sparkgpt.data.cache import build_cache
from sparkgpt.data.store import ByteCache
from sparkgpt.errors import UserError
from sparkgpt.train import plan as plan_module
from sparkgpt.train.__main__ import main as train

SHORT = ("--no-hf-export", "--save-every", "4", "--max-train-steps", "8")


def flip(path, place=-1):
    """Change one bit of a file, and keep its size and times."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_byte_changed_in_a_cache_is_refused(tmp_path, capsys, split):
    arguments = flags(tmp_path, "run-s0", *SHORT)
    for name in ("train", "val"):
        build_cache(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.cache")
        arguments += [f"--{name}-path", str(tmp_path / f"{name}.cache")]
    assert train(arguments) == 0
    flip(tmp_path / f"{split}.cache" / "bytes.bin", 50)
    assert cli(["train", *arguments, "--resume", "--max-train-steps", "12"]) == 2
    said = capsys.readouterr().err
    assert f"{split}.cache holds other bytes than its manifest says" in said
    assert cli(["train", *arguments, "--resume"]) == 2  # complete, and yet
    assert f"{split}.cache holds other bytes than its manifest says" in capsys.readouterr().err


def test_other_bytes_of_one_rank_stop_all(monkeypatch):
    failed = ["of rank 1: b.cache holds other bytes", None]
    plan = SimpleNamespace(verification=SimpleNamespace(failure=lambda: None))
    monkeypatch.setattr(plan_module, "gather_objects", lambda value, ranks: [value, *failed])
    with pytest.raises(UserError, match="of rank 1: b.cache"):
        plan_module.Plan.await_verification(plan, None)


@pytest.mark.parametrize("saves", ["4", "0"])
def test_a_byte_that_is_found_late_leaves_no_checkpoint_and_no_record(
    tmp_path, capsys, monkeypatch, saves
):
    """As of a corpus so large that its hash takes until after the first steps."""
    arguments = [*flags(tmp_path, "run-s0", *SHORT), "--train-path", str(tmp_path / "train.cache")]
    build_cache(tmp_path / "train.jsonl", tmp_path / "train.cache")
    flip(tmp_path / "train.cache" / "bytes.bin", 50)
    run = tmp_path / "runs" / "run-s0"
    real = ByteCache.verify

    def trained():
        return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0

    def late(cache):
        deadline = time.monotonic() + 60
        while not trained() and time.monotonic() < deadline:
            time.sleep(0.01)
        real(cache)

    monkeypatch.setattr(ByteCache, "verify", late)
    assert cli(["train", *arguments, "--save-every", saves]) == 2
    assert "holds other bytes than its manifest says" in capsys.readouterr().err
    assert trained()
    left = {path.name for path in run.iterdir() if "lock" not in path.name}
    assert left == {"config.json", "metrics.jsonl"}


def test_weights_that_the_record_does_not_name_are_made_again(tmp_path, capsys):
    published = tmp_path / "published"
    arguments = [*flags(tmp_path, "run-s0", *SHORT), "--resume", "--publish", str(published)]
    assert train(arguments) == 0
    run = tmp_path / "runs" / "run-s0"
    true = weights(run)
    flip(run / "model_final.safetensors")
    shutil.rmtree(published)
    assert train(arguments) == 0
    assert "not the weights that run.json names, made again" in capsys.readouterr().err
    assert weights(run) == weights(published) == true


def test_a_lost_config_loses_no_checkpoint_of_another_run(tmp_path, capsys):
    arguments = flags(tmp_path, "run-s0", *SHORT)
    assert train(arguments) == 0
    run = tmp_path / "runs" / "run-s0"
    metrics = (run / "metrics.jsonl").read_bytes()
    for name in ("config.json", "run.json"):
        (run / name).unlink()
    assert cli(["train", *arguments, "--resume", "--seed", "1"]) == 2
    assert "holds another run (step8) and none of this" in capsys.readouterr().err
    assert (run / "step8").exists() and (run / "metrics.jsonl").read_bytes() == metrics
    assert train([*arguments, "--resume"]) == 0  # its own values still find it


def test_a_damaged_line_of_metrics_is_named(tmp_path, capsys):
    arguments = flags(tmp_path, "run-s0", *SHORT)
    assert train(arguments) == 0
    path = tmp_path / "runs" / "run-s0" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:-5]
    path.write_text("\n".join(lines) + "\n")
    assert cli(["train", *arguments, "--resume", "--max-train-steps", "12"]) == 2
    assert "metrics.jsonl line 2 is damaged" in capsys.readouterr().err
    assert json.loads(lines[0])

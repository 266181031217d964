"""The record of kernel choices, and that training takes them from it and nowhere else."""

import pytest
import torch
from helpers.runs import flags, weights

from sparkgpt import autotune
from sparkgpt.cli import main as cli
from sparkgpt.files import read_json, sha256_file, write_json
from sparkgpt.ops.choices import attention_choice
from sparkgpt.train.__main__ import main as train


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("autotune") / "autotune.json"
    size = ["--tokens-per-batch", "512", "--longest", "128", "--device", "cpu", "--threads", "1"]
    autotune.main(["--attention", "2,1,16", "--attention", "4,2,8", *size, "--out", str(path)])
    return path


def test_winner_has_the_bits_of_the_reference(record):
    for choice in read_json(record)["choices"].values():
        winner = choice["candidates"][choice["winner"]]
        assert winner["bit_identical"] and choice["reference"] == "tiles"
        equal = [c for c in choice["candidates"].values() if c["bit_identical"]]
        assert winner["median_ms"] == min(c["median_ms"] for c in equal)


def test_a_faster_one_with_other_bits_does_not_win(monkeypatch):
    real = autotune._timed

    def timed(name, inputs, longest):
        seconds, results = real(name, inputs, longest)
        if name == "sdpa":
            return 1e-9, (results[0] + 1, *results[1:])
        return seconds, results

    monkeypatch.setattr(autotune, "_timed", timed)
    choice = autotune.tune_attention((2, 1, 16), torch.device("cpu"), 256, 64)
    assert choice["winner"] != "sdpa" and not choice["candidates"]["sdpa"]["bit_identical"]


def test_training_takes_and_records_the_choice(record, tmp_path):
    short = ["--max-train-steps", "3", "--no-hf-export"]
    assert train(flags(tmp_path, "tuned-s0", *short, "--autotune", str(record))) == 0
    assert train(flags(tmp_path, "plain-s0", *short)) == 0
    runs = tmp_path / "runs"
    assert weights(runs / "tuned-s0") == weights(runs / "plain-s0")
    assert read_json(runs / "tuned-s0" / "run.json")["autotune"] == sha256_file(record)


@pytest.mark.parametrize("lacks", ["shape", "device"])
def test_a_missing_choice_is_refused(record, tmp_path, capsys, lacks):
    other = tmp_path / "other.json"
    values = read_json(record)
    if lacks == "shape":
        del values["choices"]["attention/q2-kv1-h16"]
    else:
        values["device"]["type"] = "cuda"
    write_json(other, values)
    assert cli(["train", *flags(tmp_path, "run-s0", "--autotune", str(other))]) == 2
    assert "no choice for attention/q2-kv1-h16 on cpu" in capsys.readouterr().err
    assert attention_choice(str(record), "cpu", 2, 1, 16) in autotune.CANDIDATES["cpu"]

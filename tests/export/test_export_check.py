"""check-export: what it finds in sound directories and in damaged ones, library by library.

Each question to a library is a process that imports it, so that there are few of them here.
"""

import importlib.util
import json
import os
import resource
import sys

import pytest
import torch
from helpers.random_runs import random_model, write_run
from safetensors.torch import load_file, save_file

from sparkgpt.data.cache import open_documents
from sparkgpt.data.stream import validation_windows
from sparkgpt.errors import UserError
from sparkgpt.evaluate import evaluate
from sparkgpt.export import judge, probe_transformers
from sparkgpt.export.check import main
from sparkgpt.export.hf import write_hf
from sparkgpt.export.judge import check
from sparkgpt.files import read_json, write_json

TEXTS = ["Grüße aus der Küche.", "plain words", "", "表で数える。", "one more <|eos|> here", "last"]
WINDOW, VAL_TOKENS = 64, 80  # the last document stays out

needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None and os.environ.get("CI") != "true",
    reason="mlx_lm is not installed (it has no build for this platform?)",
)


def make_run(folder, variant):
    """A run folder with hf/, validated on the documents beside it."""
    model = random_model(variant)
    run = write_run(folder / "run", model, tokens_per_batch=WINDOW, val_tokens=VAL_TOKENS)
    write_hf(model.state_dict(), model.config, run / "hf")
    data = folder / "val.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    cache = open_documents(data)
    result = evaluate(model, validation_windows(cache, WINDOW, VAL_TOKENS))
    assert result["documents"] == len(TEXTS) - 1
    summary = {"final_val_loss": result["nats"], "val_digest": cache.digest}
    write_json(run / "summary.json", summary | {"val_tokens": result["tokens"]})
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {
        variant: make_run(tmp_path_factory.mktemp(variant), variant)
        for variant in ("dense", "mixed")
    }


@pytest.fixture
def in_process(monkeypatch):
    """Ask transformers in this process: the same answers, without its import each time."""

    def ask(library, directory, folder, questions, python):
        fields, logits = probe_transformers.answer(str(directory), questions)
        return fields | {"version": probe_transformers.VERSION}, logits

    monkeypatch.setattr(judge, "ask", ask)


def assert_sound(result, library):
    assert result["failures"] == [] and result["ok"]
    assert result["library"] == library
    assert result["missing_keys"] == result["unexpected_keys"] == result["mismatched_keys"] == []
    assert 0 < result["max_logit_difference"] <= 1e-4
    assert result["greedy_equal"] and result["greedy_bytes"] >= 32
    assert result["tokenizer_round_trips"] > 1000


@pytest.mark.parametrize("variant", ["dense", "mixed"])
@pytest.mark.parametrize("library", ["transformers", pytest.param("mlx", marks=needs_mlx)])
def test_sound_directories_pass_with_the_runs_own_loss(runs, variant, library):
    run = runs[variant]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    result = check(run / "hf", run, library, str(run.parent / "val.jsonl"))
    assert_sound(result, library)
    # Importing mlx lowers the open-file limit, so it must not happen in this process.
    assert "mlx.core" not in sys.modules
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == files
    assert result["library_val_loss"] == pytest.approx(result["final_val_loss"], abs=1e-4)
    assert result["final_val_loss"] == read_json(run / "summary.json")["final_val_loss"]


@pytest.mark.parametrize("variant", ["dense", "mixed"])
def test_transformers_4_reads_the_same_directory(runs, variant):
    python = os.environ.get("SPARKGPT_TF4_PYTHON")
    if not python and os.environ.get("CI") != "true":
        pytest.skip("SPARKGPT_TF4_PYTHON names no interpreter with transformers 4.57 (`make test`)")
    assert python, "CI must set SPARKGPT_TF4_PYTHON to an interpreter with transformers 4.57"
    run = runs[variant]
    result = check(run / "hf", run, "transformers", str(run.parent / "val.jsonl"), python)
    assert_sound(result, "transformers")
    assert result["version"].startswith("4.57")
    assert result["library_val_loss"] == pytest.approx(result["final_val_loss"], abs=1e-4)


def damaged(run, folder, change):
    """A copy of the run's export whose tensors went through `change`."""
    folder.mkdir()
    for path in (run / "hf").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    parts = load_file(folder / "model.safetensors")
    change(parts)
    save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lose(parts):
    del parts["model.layers.0.self_attn.q_norm.weight"]


def add(parts):
    parts["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)


def reshape(parts):
    parts["model.norm.weight"] = torch.ones(8)


@pytest.mark.parametrize(
    "change, keys, name",
    [
        (lose, "missing_keys", "model.layers.0.self_attn.q_norm.weight"),
        (add, "unexpected_keys", "model.layers.0.self_attn.q_proj.bias"),
        (reshape, "mismatched_keys", "model.norm.weight"),
    ],
)
@pytest.mark.parametrize("library", ["transformers", pytest.param("mlx", marks=needs_mlx)])
def test_damage_fails_the_check(runs, tmp_path, request, library, change, keys, name):
    if library == "transformers":
        request.getfixturevalue("in_process")
    directory = damaged(runs["dense"], tmp_path / "hf", change)
    result = check(directory, runs["dense"], library)
    assert not result["ok"]
    assert result[keys][0].startswith(name)
    assert result["failures"][0].startswith(keys.replace("_", " ") + ": " + name)
    assert sum(bool(result[k]) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")) == 1


@pytest.mark.usefixtures("in_process")
def test_a_lost_expert_and_other_weights_fail_the_check(runs, tmp_path):
    def lose_expert(parts):
        del parts["model.layers.0.mlp.experts.1.down_proj.weight"]

    directory = damaged(runs["mixed"], tmp_path / "expert", lose_expert)
    assert not check(directory, runs["mixed"], "transformers")["ok"]
    # Another checkpoint of the same shape: all keys are there, only the numbers tell.
    other = random_model("mixed", seed=1)
    write_hf(other.state_dict(), other.config, tmp_path / "other")
    result = check(tmp_path / "other", runs["mixed"], "transformers")
    assert result["failures"][0].startswith("logits differ by ")
    assert not result["greedy_equal"]


@pytest.mark.usefixtures("in_process")
def test_a_loss_that_is_not_the_runs_fails_the_check(runs, tmp_path):
    run = make_run(tmp_path, "dense")
    summary = read_json(run / "summary.json")
    write_json(run / "summary.json", summary | {"final_val_loss": summary["final_val_loss"] + 1e-3})
    result = check(run / "hf", run, "transformers", str(tmp_path / "val.jsonl"))
    assert [failure[:12] for failure in result["failures"]] == ["its loss is "]


@pytest.mark.usefixtures("in_process")
def test_bfloat16_exports_are_compared_with_rounded_weights(runs, tmp_path):
    model = random_model("dense")
    write_hf(model.state_dict(), model.config, tmp_path / "hf", dtype="bfloat16")
    assert_sound(check(tmp_path / "hf", runs["dense"], "transformers"), "transformers")


def test_wrong_data_and_a_missing_library_are_user_errors(runs, tmp_path, monkeypatch):
    (tmp_path / "other.jsonl").write_text('{"text": "not what it was validated on"}\n' * 9)
    run = runs["dense"]
    with pytest.raises(UserError, match="is not what .* was validated on"):
        check(run / "hf", run, "transformers", str(tmp_path / "other.jsonl"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"mlx_lm is not installed here; pip install 'sparkgpt\[mlx"
    ):
        check(run / "hf", run, "mlx")
    with pytest.raises(UserError, match="cannot run /no/python"):
        check(run / "hf", run, "transformers", python="/no/python")


@pytest.mark.usefixtures("in_process")
def test_command_writes_one_object_and_fails_in_one_line(runs, tmp_path, capsys):
    run, out = runs["dense"], tmp_path / "check_hf.json"
    command = [str(run / "hf"), "--run", str(run), "--json", "--library"]
    assert main([*command, "transformers", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == read_json(out)
    directory = damaged(run, tmp_path / "hf", lose)
    with pytest.raises(UserError, match="missing keys: .*q_norm") as caught:
        main([str(directory), *command[1:], "transformers", "--out", str(out)])
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert read_json(out)["ok"] is False


@pytest.mark.usefixtures("in_process")
def test_command_reports_the_worst_of_both_libraries(runs, capsys, monkeypatch):
    run = runs["dense"]

    def fake(directory, run, library, data, python):
        fields = {"run": "run", "tolerance": 1e-4, "final_val_loss": None, "library": library}
        fields |= {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        worse = library == "mlx"
        fields |= {"version": "1", "max_logit_difference": 2e-5 if worse else 1e-5}
        fields |= {"greedy_equal": True, "greedy_bytes": 9, "tokenizer_round_trips": 7}
        return fields | {"failures": [], "ok": True}

    monkeypatch.setattr(judge, "check", fake)
    assert main([str(run / "hf"), "--run", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["max_logit_difference"] == 2e-5
    assert result["version"] == {"transformers": "1", "mlx": "1"}
    assert [item["library"] for item in result["results"]] == ["transformers", "mlx"]

"""What a run leaves behind, and what it says when it can't run."""

import json
import math
import shutil

import pytest
import torch
from helpers.runs import MOE, flags, timeless, weights, whole_steps, write_documents

from sparkgpt.checkpoint import read_run
from sparkgpt.cli import main as cli
from sparkgpt.export.hf import read_hf
from sparkgpt.files import sha256_file
from sparkgpt.train.__main__ import main as train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    assert train(flags(folder, "dense-s0", "--save-every", "10")) == 0
    assert train(flags(folder, "moe-s3", *MOE, "--seed", "3")) == 0
    return folder / "runs"


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["dense-s0", "moe-s3"])
def test_files_and_final_figures(runs, name):
    run = runs / name
    summary, config = read(run / "summary.json"), read(run / "config.json")
    assert summary["row"] == name.split("-")[0] and summary["seed"] == int(name[-1])
    assert summary["initial_loss"] == pytest.approx(math.log(259), abs=1e-6)
    assert summary["final_val_loss"] < 4.5
    bits = summary["final_val_loss"] / math.log(2)
    assert summary["final_val_bpb"] == pytest.approx(bits, rel=1e-12)
    assert summary["weights_sha256"] == sha256_file(run / "model_final.safetensors")
    assert summary["window_tokens"] == summary["steps"] * 1024
    assert summary["window_tokens_per_second"] > 0 and summary["tflops_per_second"] > 0
    assert summary["utilization"] == summary["real_tokens"] / summary["window_tokens"]
    assert 24_000 <= summary["real_tokens"] < 24_000 + 1024
    assert config["data"]["stream"] == summary["stream_digest"]
    assert (run / "hf" / "model.safetensors").exists()
    record = read(run / "run.json")
    assert record["attempts"][-1]["end"] == "complete"
    assert record["validations"][-1] == [summary["steps"], summary["final_val_loss"]]
    assert not list(run.glob(".*tmp"))


def test_metrics_have_every_mark_once(runs):
    lines = timeless(runs / "moe-s3")
    steps = read(runs / "moe-s3" / "summary.json")["steps"]
    logged = [x["step"] for x in lines if x["kind"] == "train"]
    assert logged == sorted({1, steps, *range(4, steps + 1, 4)})
    marks = [x["step"] for x in lines if x["kind"] == "val"]
    assert marks == sorted({math.ceil(steps * i / 20 - 1e-9) for i in range(1, 21)})
    last = [x for x in lines if x["kind"] == "train"][-1]
    assert last["train/aux_loss"] == pytest.approx(2, abs=1) and last["lr/factor"] == 0.1
    assert len(last["router/load"]) == 2 and sum(last["router/load"][0]) == pytest.approx(
        4, abs=1e-3
    )
    assert 0 < last["router/entropy"] <= math.log(4) + 1e-6


def test_real_rate_is_window_rate_times_utilization(runs):
    for line in (runs / "dense-s0" / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        if line["kind"] == "train":
            real = line["window_tokens_per_second"] * line["utilization"]
            assert line["real_tokens_per_second"] == pytest.approx(real)


def test_checkpoints_and_their_twins(runs):
    run = runs / "dense-s0"
    steps = read(run / "summary.json")["steps"]
    kept = sorted(p.name for p in run.iterdir() if p.name.startswith(("step", "hf_step")))
    expected = {10, 20, steps}
    assert kept == sorted(f"{kind}{n}" for kind in ("step", "hf_step") for n in expected)
    saved = {step: read_run(run / f"step{step}")[1] for step in expected}
    for step, tensors in saved.items():
        _, exported = read_hf(run / f"hf_step{step}")
        assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())
    assert not torch.equal(saved[10]["lm_head.weight"], saved[20]["lm_head.weight"])


MISTAKES = {
    "no such file": (["--train-path", "nowhere.jsonl"], "nowhere.jsonl"),
    "kv heads": (["--attention-heads", "4", "--kv-heads", "3"], "--kv-heads 3 does not divide"),
    "top-k": (["--num-experts", "2", "--num-experts-per-tok", "3"], "--num-experts-per-tok 3"),
    "no such layer": ([*MOE, "--mlp-only-layers", "0,7"], "layer 7"),
    "no sparse layer": ([*MOE, "--decoder-sparse-step", "9"], "no layer is sparse"),
    "unknown flag": (["--no-such-flag"], "--no-such-flag"),
    "not a number": (["--model-dim", "wide"], "--model-dim"),
    "odd head": (["--head-dim", "15"], "--head-dim 15"),
    "document too long": (["--max-position-embeddings", "64"], "--max-position-embeddings 64"),
    "window too small": (["--tokens-per-batch", "100"], "--tokens-per-batch 100"),
    "no cuda": (["--device", "cuda"], "--device cuda"),
    "flash-attn on a cpu": (["--attention-backend", "flash-attn"], "flash-attn"),
    "our kernels on a cpu": (["--attention-backend", "triton"], "triton needs a CUDA device"),
    "nan": (["--muon-lr", "nan"], "--muon-lr nan"),
    "infinity": (["--target-tokens", "inf"], "--target-tokens inf"),
    "negative std": (["--mup-hidden-std", "-1"], "--mup-hidden-std -1"),
    "huge": (["--model-dim", "99999999999999999999"], "--model-dim 99999999999999999999"),
    "huge seed": (["--seed", "99999999999999999999"], "--seed 99999999999999999999"),
    "endless": (["--target-tokens", "1e12"], "epochs of"),
    "no such layer, dense": (["--mlp-only-layers", "7"], "layer 7"),
    "publish below a file": (["--publish", "/dev/null/x"], "/dev/null/x"),
    "name with a slash": (["--run-name", "a/b"], "--run-name"),
    "other code": (["--expect-code", "0" * 64], "training code changed"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, capsys, name):
    wrong, said = MISTAKES[name]
    try:
        code = cli(["train", *flags(tmp_path, "dense-s0", *wrong)])
    except SystemExit as stop:
        code = stop.code
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("cache ")]
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("sparkgpt: error: ") and said in lines[0]


def test_a_run_that_diverges_says_where(tmp_path, capsys):
    code = cli(["train", *flags(tmp_path, "wild-s0", "--adamw-lr", "1e30", "--muon-lr", "1e30")])
    said = capsys.readouterr().err
    assert code == 1 and "at step 5, bad step number 4 in a row" in said
    assert "there is none before it" in said and "Traceback" not in said
    assert not (tmp_path / "runs" / "wild-s0" / "summary.json").exists()


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path, capsys, monkeypatch):
    from sparkgpt import checkpoint

    def full(*arguments):
        raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")

    arguments = flags(tmp_path, "full-s0", "--save-every", "10")
    assert train([*arguments, "--max-train-steps", "10"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        assert cli(["train", *arguments, "--resume"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "free space" in said
    run = tmp_path / "runs" / "full-s0"
    assert whole_steps(run) == {10} and not list(run.glob(".*tmp"))
    assert train([*arguments, "--resume"]) == 0


@pytest.mark.parametrize("damage", ["cut weights", "no model in config", "other shape"])
def test_damaged_runs_are_one_line(runs, tmp_path, capsys, damage):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "model_final.safetensors"):
        (run / name).write_bytes((runs / "dense-s0" / name).read_bytes())
    if damage == "cut weights":
        weights = (run / "model_final.safetensors").read_bytes()
        (run / "model_final.safetensors").write_bytes(weights[: len(weights) // 2])
    elif damage == "no model in config":
        (run / "config.json").write_text("{}")
    else:
        config = (run / "config.json").read_text()
        (run / "config.json").write_text(config.replace('"model_dim": 32', '"model_dim": 64'))
    assert cli(["generate", "--model", str(run), "--prompt", "x"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("sparkgpt: error: ") and len(said.splitlines()) == 1


def test_an_export_replaces_nothing_but_an_export(runs, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("irreplaceable")
    for target in (mine, runs / "dense-s0", mine / "thesis.txt"):
        assert cli(["export", str(runs / "dense-s0"), "--out", str(target)]) == 2
        assert "is not an export" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "irreplaceable"
    for _ in range(2):  # a second export may replace the first
        assert cli(["export", str(runs / "dense-s0"), "--out", str(tmp_path / "new")]) == 0


def test_a_path_below_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    code = cli(["train", *flags(tmp_path, "run", "--out-dir", str(tmp_path / "file" / "runs"))])
    assert code == 2 and "cannot make the folder" in capsys.readouterr().err


def test_an_existing_run_is_not_overwritten(runs, capsys):
    before = (runs / "dense-s0" / "summary.json").read_bytes()
    assert cli(["train", *flags(runs.parent, "dense-s0")]) == 2
    assert "--resume" in capsys.readouterr().err
    assert (runs / "dense-s0" / "summary.json").read_bytes() == before


def one_byte_changed(path, out):
    text = path.read_bytes()
    place = text.index(b"alpha")
    out.write_bytes(text[:place] + b"b" + text[place + 1 :])
    return str(out)


def test_resume_with_other_values_names_them(runs, capsys, tmp_path):
    other = one_byte_changed(runs.parent / "train.jsonl", tmp_path / "other.jsonl")
    changes = {
        "seed was 0, is 1": ["--seed", "1"],
        "muon_lr was 0.004, is 0.01": ["--muon-lr", "0.01"],
        "tokens_per_batch was 1024, is 2048": ["--tokens-per-batch", "2048"],
        "train_digest was": ["--train-path", other],
        "adamw_lr was 0.0005, is 0.001; muon_lr was 0.004, is 0.01": [
            *("--adamw-lr", "0.001"), *("--muon-lr", "0.01")
        ],
    }  # fmt: skip
    for expected, more in changes.items():
        assert cli(["train", *flags(runs.parent, "dense-s0", "--resume", *more)]) == 2
        said = capsys.readouterr().err
        assert "belongs to another run" in said and expected in said


def test_a_checkpoint_of_another_run_is_passed_over(runs, tmp_path, capsys):
    arguments = flags(tmp_path, "guest-s0", "--no-hf-export", "--save-every", "10")
    assert train([*arguments, "--max-train-steps", "10"]) == 0
    run = tmp_path / "runs" / "guest-s0"
    shutil.copytree(runs / "dense-s0" / "step20", run / "step20")
    manifest = read(run / "step20" / "manifest.json")
    manifest["run"] = "0" * 64
    (run / "step20" / "manifest.json").write_text(json.dumps(manifest))
    assert train([*arguments, "--resume"]) == 0
    said = capsys.readouterr().err
    assert "step20: belongs to another run, passed over" in said and "after step 10" in said
    assert (run / "other-step20" / "manifest.json").exists()
    assert weights(run) == weights(runs / "dense-s0")


def test_another_thread_count_is_allowed_and_recorded(tmp_path, capsys):
    arguments = flags(tmp_path, "threads-s0", "--no-hf-export", "--save-every", "10")
    assert train([*arguments, "--max-train-steps", "10"]) == 0
    run = tmp_path / "runs" / "threads-s0"
    assert read(run / "run.json")["exact"] is True
    assert train([*arguments, "--resume", "--threads", "2"]) == 0
    assert "threads was 1, is 2: allowed, but not exact" in capsys.readouterr().err
    record = read(run / "run.json")
    assert record["exact"] is False
    assert [x["inexact"]["threads"] for x in record["attempts"]] == [1, 2]


def test_the_cost_of_saves_is_reported(runs):
    attempt = read(runs / "dense-s0" / "run.json")["attempts"][-1]
    folder = runs / "dense-s0" / "step20"
    size = sum(f.stat().st_size for p in (folder, folder.parent / "hf_step20") for f in p.iterdir())
    assert attempt["saves"] == 3 and attempt["save_seconds"] > 0
    assert attempt["save_bytes"] == pytest.approx(3 * size, rel=0.01)


def test_more_tokens_than_the_corpus_holds_means_more_epochs(tmp_path):
    write_documents(tmp_path / "train.jsonl", 20, 0)
    write_documents(tmp_path / "val.jsonl", 2, 1)
    assert train(flags(tmp_path, "many-s0", "--target-tokens", "12000")) == 0
    summary = read(tmp_path / "runs" / "many-s0" / "summary.json")
    assert summary["real_tokens"] >= 12_000


def test_threads_are_recorded(runs):
    assert read(runs / "dense-s0" / "run.json")["platform"]["threads"] == 1


def test_an_optimizer_state_of_other_updates_is_refused(tmp_path, capsys):
    arguments = flags(tmp_path, "mixed-s0", "--no-hf-export", "--save-every", "10")
    assert train([*arguments, "--max-train-steps", "20"]) == 0
    run = tmp_path / "runs" / "mixed-s0"
    shutil.copy(run / "step10" / "optimizer.safetensors", run / "step20")
    manifest = read(run / "step20" / "manifest.json")
    manifest["sha256"]["optimizer.safetensors"] = sha256_file(
        run / "step20" / "optimizer.safetensors"
    )
    (run / "step20" / "manifest.json").write_text(json.dumps(manifest))
    assert cli(["train", *arguments, "--resume"]) == 2
    assert "optimizer state of 10 updates, not 20" in capsys.readouterr().err

"""Held-out loss: against the documents one at a time, in float64, by the definition."""

import json
import math

import pytest
import torch
from helpers.random_runs import logits, random_model, write_run

from sparkgpt.data.cache import open_documents
from sparkgpt.data.stream import empty_window, validation_windows
from sparkgpt.errors import UserError
from sparkgpt.evaluate import evaluate, main
from sparkgpt.export.hf import write_hf

TEXTS = ["Grüße aus der Küche.", "plain words", "", "表で数える。", "x" * 100, "last of all"]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def longhand(model, texts):
    """Sum of nats over b1 .. bn EOS of each document, each evaluated alone."""
    total = 0.0
    for text in texts:
        document = text.encode()
        log_probs = logits(model, [256, *document]).double().log_softmax(-1)
        total -= sum(log_probs[i, target].item() for i, target in enumerate([*document, 257]))
    return total


@pytest.mark.parametrize("variant", ["dense", "mixed"])
def test_loss_is_the_mean_over_real_targets(variant, data):
    model = random_model(variant)
    windows = validation_windows(open_documents(data), 128, 10_000)
    assert len(windows) > 1
    result = evaluate(model, windows)
    targets = sum(len(text.encode()) + 1 for text in TEXTS)
    assert (result["tokens"], result["documents"]) == (targets, len(TEXTS))
    assert result["nats_sum"] == pytest.approx(longhand(model, TEXTS), rel=1e-6)
    assert result["nats"] == result["nats_sum"] / targets
    assert result["bits_per_byte"] == pytest.approx(result["nats"] / math.log(2))


def test_filler_counts_for_nothing(data):
    model = random_model("mixed")
    windows = validation_windows(open_documents(data), 256, 10_000)
    wide = validation_windows(open_documents(data), 1000, 10_000)
    result = evaluate(model, [*windows, empty_window(256)])
    assert result["nats_sum"] == pytest.approx(evaluate(model, wide)["nats_sum"], rel=1e-6)


def test_the_train_mode_and_the_gradients_are_left_alone(data):
    model = random_model("dense")
    windows = validation_windows(open_documents(data), 256, 10_000)
    for mode in (True, False):
        model.train(mode)
        evaluate(model, windows)
        assert model.training is mode
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mean_over_nothing_is_refused():
    with pytest.raises(ValueError, match="no real target"):
        evaluate(random_model("dense"), [empty_window(64)])


def run_main(capsys, *argv):
    assert main(["--json", "--device", "cpu", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_gives_the_same_for_a_run_and_its_export(data, tmp_path, capsys):
    model = random_model("mixed")
    run = write_run(tmp_path / "run", model)
    write_hf(model.state_dict(), model.config, tmp_path / "hf")
    ours = run_main(capsys, "--model", run, "--data", data)
    assert ours["nats"] == pytest.approx(longhand(model, TEXTS) / ours["tokens"], rel=1e-6)
    assert ours["data_digest"] == open_documents(data).digest
    theirs = run_main(capsys, "--model", tmp_path / "hf", "--data", data)
    assert theirs["nats"] == ours["nats"]


def test_command_takes_leading_whole_documents(data, tmp_path, capsys):
    run = write_run(tmp_path / "run", random_model("dense"))
    first = len(TEXTS[0].encode()) + 1
    result = run_main(capsys, "--model", run, "--data", data, "--tokens", first + 5)
    assert (result["documents"], result["tokens"]) == (1, first)
    with pytest.raises(UserError, match=f"--tokens {first - 1} holds not even the first document"):
        main(["--model", str(run), "--data", str(data), "--tokens", str(first - 1)])


def test_command_refuses_what_does_not_fit(data, tmp_path):
    run = write_run(tmp_path / "run", random_model("dense", max_position_embeddings=64))
    with pytest.raises(UserError, match="document 4 .* fills 101 positions .* 64"):
        main(["--model", str(run), "--data", str(data)])
    run = write_run(tmp_path / "run", random_model("dense"))
    with pytest.raises(UserError, match="fills 101 positions .* --tokens-per-batch 50"):
        main(["--model", str(run), "--data", str(data), "--tokens-per-batch", "50"])
    with pytest.raises(UserError, match="model_final.safetensors"):
        main(["--model", str(tmp_path), "--data", str(data)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_a_user_error(data, tmp_path):
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        main(["--model", str(tmp_path), "--data", str(data), "--device", "cuda"])

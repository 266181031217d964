"""The benchmark's contestants and figures: bare kernels, documents, memory, data."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparkgpt.bench import datapath, startup
from sparkgpt.bench.agreement import gradient_differences, worst_of
from sparkgpt.bench.bare import BareAttention, BareProducts, matrix_shapes
from sparkgpt.bench.child import run_child
from sparkgpt.bench.documents import (
    LONGEST,
    news_lengths,
    synthetic_documents,
    write_jsonl,
    write_sparse_cache,
    write_synthetic_cache,
)
from sparkgpt.bench.memory import needed_bytes
from sparkgpt.bench.shapes import DEFAULT, Settings, chunk_of
from sparkgpt.bench.step import open_data
from sparkgpt.data.cache import open_documents
from sparkgpt.data.store import ByteCache
from sparkgpt.errors import UserError
from sparkgpt.model.cost import parameter_counts

SETTINGS = Settings(shape=DEFAULT, moe=True)


def test_default_shape_and_its_moe_are_equally_wide():
    dense, moe = (parameter_counts(model) for model in SETTINGS.models().values())
    assert dense["total"] == dense["active"] == 854_400
    router = DEFAULT["model_layers"] * DEFAULT["model_dim"] * 8
    assert moe["active"] == dense["active"] + router and moe["total"] > 2 * dense["total"]


def test_bare_products_are_those_of_the_model():
    shapes = matrix_shapes(SETTINGS.model)
    weights = sum(count * outputs * inputs for count, outputs, inputs in shapes)
    assert weights == parameter_counts(SETTINGS.model)["matmul_active"]
    with pytest.raises(ValueError):
        matrix_shapes(SETTINGS.moe_model)


def test_bare_products_compute_outputs_and_gradients():
    bare = BareProducts(SETTINGS.model, window=16)
    bare.run()
    for _, x_TI, dx_TI, y_TO, dy_TO, w_OI, dw_OI in bare.products:
        x = x_TI.clone().requires_grad_()
        w = w_OI.clone().requires_grad_()
        y = torch.nn.functional.linear(x, w)
        y.backward(dy_TO)
        for found, expected in ((y_TO, y), (dx_TI, x.grad), (dw_OI, w.grad)):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


def test_bare_attention_runs_every_segment_of_every_layer(monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, is_causal):
        assert is_causal and k.shape == v.shape == q.shape
        seen.append(q.shape[2])
        return real(q, k, v, is_causal=True)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    BareAttention(SETTINGS.model).ready([5, 1, 9])()
    assert seen == [5, 1, 9] * DEFAULT["model_layers"]


def test_lengths_are_those_of_the_news_corpus():
    lengths = news_lengths(40_000, LONGEST, 0)
    assert abs(np.median(lengths) / 2714 - 1) < 0.03 and abs(lengths.mean() / 3310 - 1) < 0.03
    short = news_lengths(40_000, 2047, 0)
    assert short.min() >= 1 and short.max() <= 2047 and abs(short.mean() / 1186 - 1) < 0.03
    assert np.array_equal(lengths, news_lengths(40_000, LONGEST, 0))
    assert not np.array_equal(lengths, news_lengths(40_000, LONGEST, 1))
    assert abs(lengths.mean() / datapath.MEAN_BYTES - 1) < 0.03


def test_documents_have_their_lengths_as_jsonl_and_as_a_cache(tmp_path):
    lengths = np.array([1, 2, 3, 50, 3000])
    documents = list(synthetic_documents(lengths, 0))
    assert [len(document) for document in documents] == lengths.tolist()
    path = tmp_path / "docs.jsonl"
    assert write_jsonl(path, lengths, 0) == path.stat().st_size
    assert [json.loads(x)["text"].encode() for x in path.read_bytes().splitlines()] == documents
    cache = write_synthetic_cache(tmp_path / "cache", lengths, 0)
    cache.verify()
    assert cache.digest == open_documents(path).digest


def test_sparse_cache_opens_takes_no_disk_and_is_no_content(tmp_path):
    lengths = np.full(1000, 5000)
    write_sparse_cache(tmp_path / "sparse", lengths)
    cache = ByteCache.open(tmp_path / "sparse")
    assert np.array_equal(cache.lengths, lengths)
    assert (tmp_path / "sparse" / "bytes.bin").stat().st_blocks * 512 < lengths.sum() / 10
    with pytest.raises(UserError):
        cache.verify()


def test_needed_memory_is_mostly_activations():
    needed = needed_bytes(SETTINGS)
    assert needed["weights"] == needed["gradients"] == 4 * 854_400
    assert needed["activations"] == 4 * 8192 * (4 * (3 * 128 + 3 * 128 + 3 * 64 + 3 * 384) + 1161)
    assert needed["window"] == 24 * 8192


def test_a_gradient_that_differs_or_is_nan_is_told():
    theirs = {"a": torch.ones(4), "b": torch.full((2,), 3.0)}
    ours = {"a": torch.ones(4), "b": torch.tensor([3.0, 3.3])}
    found = gradient_differences(ours, theirs)
    assert found["a"] == 0 and found["b"] == pytest.approx(0.3 / (3 * 2**0.5), rel=1e-4)
    assert worst_of(found) == "b"
    ours["a"][2] = float("nan")
    assert worst_of(gradient_differences(ours, theirs)) == "a"
    assert worst_of({"b": 3.0, "a": float("nan"), "c": 4.0}) == "a"
    with pytest.raises(AssertionError):
        gradient_differences({"a": ours["a"]}, theirs)


def test_documents_of_the_step(tmp_path):
    given = write_synthetic_cache(tmp_path / "given", np.array([50, 90, 70]), 0)
    settings = Settings(shape=DEFAULT, window=256, longest=90)
    assert open_data(replace(settings, data=str(given.path)), tmp_path).digest == given.digest
    with pytest.raises(UserError, match="--longest"):
        open_data(replace(settings, data=str(given.path), longest=89), tmp_path)
    own = open_data(settings, tmp_path)
    assert own.lengths.max() <= 90 and own.lengths.sum() > 10 * 256


def test_chunks():
    assert chunk_of(8192) == 2048 and chunk_of(256) == 256
    with pytest.raises(UserError, match="multiple"):
        chunk_of(3000)


def test_data_section(tmp_path):
    result = datapath.run_data([0.0006], 300, 0, tmp_path)
    (last,) = result["series"]
    assert last["documents"] == pytest.approx(0.0006 * 1e9 / 3310, abs=1)
    assert last["cache_cpu_seconds"] > 0 and last["start_seconds"] >= last["rejoin_seconds"] > 0
    assert last["cache_peak_rss_bytes"] > 2**20 and last["stream_peak_rss_bytes"] > 2**20
    assert result["many"]["documents"] == 300 and result["many"]["again"]["open_seconds"] > 0
    figures = result["figures"]
    assert figures["planned_documents_per_second"] == last["documents"] / last["plan_seconds"]
    assert figures["batch_milliseconds"] == 1e3 * last["batch_seconds"]
    assert figures["open_seconds"] is None and figures["resume_seconds"] is None
    assert 0.5 < figures["packing_8192"] <= 1
    left = [path.name for path in tmp_path.iterdir()]  # a corpus is gone once it was measured
    assert all(name.endswith(".lock") for name in left)


def test_figures_are_those_of_the_largest_size(tmp_path, monkeypatch):
    def measure(size, seed, folder, done):
        return {"gb": size, "documents": 50}

    figures = lambda largest, many, packing: {"gb": largest["gb"], "windows": list(packing)}
    monkeypatch.setattr(datapath, "measure", measure)
    monkeypatch.setattr(datapath, "measure_many", lambda *rest: {})
    monkeypatch.setattr(datapath, "figures", figures)
    result = datapath.run_data([0.002, 0.001], 300, 0, tmp_path)
    assert [row["gb"] for row in result["series"]] == [0.001, 0.002]
    assert result["figures"] == {"gb": 0.002, "windows": ["49152", "8192"]}


def test_limits_that_were_reached_are_judged():
    again = {"open_seconds": 0.1, "rejoin_seconds": 0.4}
    many = {"documents": datapath.MANY, "bytes": datapath.BIG, "again": again}
    largest = {"caching_mb_per_cpu_second": 1.0, "planned_documents_per_second": 1.0,
               "batch_seconds": 1.0}  # fmt: skip
    found = datapath.figures(largest, many, {"49152": 1.0, "8192": 1.0})
    assert (found["open_seconds"], found["resume_seconds"]) == (0.1, 0.5)


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="TMPDIR"):
        datapath.check_space([0.1, 1.0], tmp_path)
    datapath.check_space([0.1], tmp_path)


def test_startup_times_commands_that_work_and_tells_of_those_that_fail(tmp_path, monkeypatch):
    fine = (*startup.PYTHON, "sparkgpt", "--version")
    broken = (*startup.PYTHON, "sparkgpt", "nothing")
    monkeypatch.setattr(startup, "COMMANDS", {"fine_seconds": fine, "broken_seconds": broken})
    monkeypatch.setattr(startup, "REPEATS", 2)
    monkeypatch.setattr(startup, "first_step", lambda settings, folder: 3.0)
    result = startup.run_startup(SETTINGS, tmp_path)
    assert 0 < result["figures"]["fine_seconds"] < 10
    assert result["figures"]["first_step_seconds"] == 3.0
    assert "broken_seconds" not in result["figures"]
    assert "no command 'nothing'" in result["failed"]["broken_seconds"]


def test_first_step_waits_for_a_whole_line_of_training(tmp_path, monkeypatch):
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import pathlib, sys, time\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out-dir') + 1], 'first-step')\n"
        "out.mkdir()\n"
        "with open(out / 'metrics.jsonl', 'w', buffering=1) as file:\n"
        '    print(\'{"kind": "val"}\', file=file)\n'
        '    file.write(\'{"kind": "tr\'); file.flush()\n'
        "    time.sleep(0.5)\n"
        "    print('ain\"}', file=file)\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.setattr(startup, "PYTHON", (sys.executable, str(trainer)))
    assert 0.5 < startup.first_step(SETTINGS, tmp_path) < 30  # and doesn't wait for its end


def test_a_run_without_a_step_is_an_error(tmp_path, monkeypatch):
    trainer = tmp_path / "trainer.py"
    trainer.write_text("import sys\nsys.exit('out of luck')\n")
    monkeypatch.setattr(startup, "PYTHON", (sys.executable, str(trainer)))
    with pytest.raises(UserError, match="logged no step: out of luck"):
        startup.first_step(SETTINGS, tmp_path)


def test_a_process_that_fails_says_why():
    with pytest.raises(UserError, match="'train' ended with 2: .*--model-layers 0"):
        run_child("train", {"flags": ["--model-layers", "0"]})

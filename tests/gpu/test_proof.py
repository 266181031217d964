"""The GPU proof's arithmetic, tables and dry run, with timings made up; its cases on a CPU."""

import json
import subprocess
import time

import pytest
import torch
from gpu import cases, modules, proof, table

from sparkgpt.config import ModelConfig
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import parse_train
from sparkgpt.model.bytes import FUSIONS

RATES = {"gemm": 100e12, "copy": 200e9}


def test_errors_are_relative_to_the_same_precision():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    same, ours = torch.tensor([1.0, 2.01]), torch.tensor([1.0, 1.985])
    assert table.error_ratio([ours], [same], [exact]) == pytest.approx(1.5, rel=1e-3)
    assert table.error_ratio([same, ours], [same, same], [exact, exact]) > 1.4
    assert table.error_ratio([ours * float("nan")], [same], [exact]) == float("inf")
    rounded = exact.bfloat16()
    assert table.error_ratio([rounded], [rounded], [exact]) == 0


def test_floor_is_the_larger_of_two():
    assert table.floor_ms(2e9, 0.5e12, 200e9, 100e12) == pytest.approx(10)
    assert table.floor_ms(2e8, 5e12, 200e9, 100e12) == pytest.approx(50)


def test_rows_and_their_table():
    good = table.kernel_row("a kernel", 1.5, 2.0, 3.0, None, 1.0)
    assert good["gain"] == 1.5 and good["of floor"] == 0.5 and good["passed"]
    assert not table.kernel_row("b", 2.5, 2.0, 3.0, None, 1.0)["passed"]
    rows = [good, table.failed_row("case", "another", table.NOT_RUN)]
    lines = table.render(table.KERNELS, rows).splitlines()
    assert lines[0].split()[:2] == ["case", "errors"] and "50.0%" in lines[1]
    assert lines[2].split(maxsplit=1) == ["another", table.NOT_RUN]


def test_a_training_row_from_a_summary():
    summary = {
        "window_tokens_per_second": 98_304.0, "tokens_per_batch": 49_152, "accumulate": 1,
        "tflops_per_second": 50.0, "peak_memory_bytes": 2**31,
    }  # fmt: skip
    row = table.training_row("run", summary, 50e9, 1e12, RATES, 200e12)
    assert row["ms"] == 500 and row["floor ms"] == 250 and row["of floor"] == 0.5
    assert (row["MFU spec"], row["MFU measured"], row["peak GiB"]) == (0.25, 0.5, 2.0)
    assert table.training_row("run", summary, 50e9, 1e12, RATES, None)["MFU spec"] is None
    shown = table.render(table.TRAINING, [row])
    assert "98,304" in shown and "25.0%" in shown


def test_a_case_is_never_below_its_floor_by_more_fusions():
    for case in cases.CASES:
        assert set(case.fused) <= set(FUSIONS)
        assert cases.case_bytes(case) < cases.case_bytes(case.plain)
        assert cases.case_flops(case) == cases.case_flops(case.plain) > 0
    (mlp,) = [c for c in cases.CASES if c.name == "dense 50M: mlp swiglu"]
    assert cases.case_bytes(mlp) == 2 * 49_152 * (6 * 512 + 12 * 1536)
    assert cases.case_flops(mlp) == 49_152 * 18 * 512 * 1536


def test_every_flag_is_run_off_and_on():
    for _, shape, flags in proof.runs():
        model, train = parse_train(
            proof.train_words(shape, flags, "d", proof.Path("o"), "r")[1:], "run"
        )
        assert model == cases.SHAPES[shape] and train.autotune_gemm is ("autotune-gemm" in flags)
    names = [name for name, _, _ in proof.runs()]
    assert len(names) == len(set(names)) == 6 + 5 + 6 + 5 + 3


def test_dry_run_and_refusal():
    run = lambda *words: subprocess.run(
        [ROOT / "tests/gpu/run", *words], capture_output=True, text=True
    )
    listed = run("--list", "training").stdout.splitlines()
    assert len(listed) == 1 + len(proof.runs()) and "dense 50M: none, 30 steps" in listed[1]
    assert run("nothing").returncode == 2
    if not torch.cuda.is_available():
        refused = run()
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1


def test_documents_fill_windows(tmp_path):
    path = proof.write_documents(tmp_path / "documents.jsonl")
    lengths = {len(json.loads(line)["text"].encode()) for line in open(path)}
    assert lengths == {cases.DOCUMENT - 1} and cases.POSITIONS % cases.DOCUMENT == 0


def test_what_time_does_not_allow_is_said(tmp_path, capsys):
    past = time.monotonic() - 1
    rows = proof.kernel_section({"rates": RATES}, tmp_path, past)
    rows += proof.training_section({"specification": None}, tmp_path, past)
    assert len(rows) == len(cases.CASES) + len(proof.runs())
    assert all(row["note"] == table.NOT_RUN and not row["passed"] for row in rows)
    assert capsys.readouterr().out.count(table.NOT_RUN) == len(rows)


def test_a_program_that_takes_too_long(tmp_path):
    words = ["sh", "-c", "echo begun; sleep 30"]
    assert proof._run(words, {"PATH": "/bin:/usr/bin"}, 0.0, tmp_path / "log") == (None, "begun")
    assert proof._run(["sh", "-c", "echo a; exit 3"], {"PATH": "/bin:/usr/bin"}, 0.0,
                      tmp_path / "log") == (3, "a")  # fmt: skip


@pytest.mark.parametrize("part", ["mlp", "attention", "moe", "head", "muon"])
def test_modules_run_forward_and_backward(part, monkeypatch):
    tiny = ModelConfig(
        model_layers=1, model_dim=16, attention_heads=2, kv_heads=1, head_dim=8,
        intermediate_size=24, num_experts=4 if part == "moe" else 0, moe_intermediate_size=8,
    )  # fmt: skip
    monkeypatch.setitem(cases.SHAPES, "tiny", tiny)
    case = cases.Case(part, "tiny")
    once = modules.build(case, torch.device("cpu"), torch.float64, 40)()
    again = modules.build(case, torch.device("cpu"), torch.float64, 40)()
    assert len(once) > 1 and all(tensor.isfinite().all() for tensor in once)
    assert table.error_ratio(once, again, once) == 0
    assert any(tensor.abs().max() > 0 for tensor in once[1:])
    if part == "muon":  # in float32 by the optimizer itself
        single = modules.build(case, torch.device("cpu"), torch.float32, 40)()
        assert all(
            torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(single, once, strict=True)
        )

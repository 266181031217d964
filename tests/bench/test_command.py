"""`sparkgpt bench` from end to end on a model of one layer, and what it refuses."""

import contextlib
import io
import json

import pytest

from sparkgpt import cli
from sparkgpt.bench import agreement, command, step
from sparkgpt.bench.aims import AIMS, table
from sparkgpt.fingerprint import ROOT

TINY = (
    "bench --only step --model-layers 1 --model-dim 32 --attention-heads 2 --kv-heads 1 "
    "--head-dim 16 --intermediate-size 64 --window 256 --longest 100 --rounds 2 --warm-steps 2 "
    "--profiled 1 --threads 1 --moe"
).split()
SPEEDS = [aim.figure for aim in AIMS if aim.section == "step"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The record of one tiny run, and what was printed beside it."""
    path = tmp_path_factory.mktemp("bench") / "record.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*TINY, "--out", str(path)]) == 0
    return json.loads(path.read_text()) | {"printed": printed.getvalue()}


def test_record_of_a_step(record):
    assert record["schema"] == command.SCHEMA and record["agreed"]
    assert all(isinstance(record[name], float) for name in SPEEDS)
    assert not any(aim.figure in record for aim in AIMS if aim.section != "step")
    assert {"transformers", "torch"} <= record["machine"]["versions"].keys()
    assert record["machine"]["platform"]["threads"] == 1 and record["machine"]["platform"]["cpu"]
    assert len(record["load_before"]) == len(record["load_after"]) == 3
    assert record["settings"]["shape"]["model_dim"] == 32


def test_printed_table_is_that_of_the_record(record):
    assert record["printed"] == table(record, ["step"]) + "\n"


def test_record_is_shown_again(record, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({name: record[name] for name in record if name != "printed"}))
    assert cli.main(["bench", "--show", str(path)]) == 0
    assert capsys.readouterr().out == record["printed"]


@pytest.mark.parametrize("other", [{"schema": 2}, {"agreed": False}])
def test_other_records_are_not_shown(record, other, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(
        json.dumps({name: record[name] for name in record if name != "printed"} | other)
    )
    assert cli.main(["bench", "--show", str(path)]) == 2
    assert "is no record of `sparkgpt bench`" in capsys.readouterr().err


def test_documents_show_the_published_record():
    published = json.loads((ROOT / "results/bench/cpu.json").read_text())
    text = (ROOT / "docs/bench.md").read_text()
    block = text.split("<!-- bench:begin -->\n```\n")[1].split("\n```\n<!-- bench:end -->")[0]
    assert block == table(published, list(command.SECTIONS)), (
        "replace it by what `sparkgpt bench --show results/bench/cpu.json` prints"
    )


def test_figures_follow_from_the_samples(record):
    part = record["step"]
    names = {"ours", "moe", "masked_peer", "unmasked_peer", "bare_gemm", "bare_attention"}
    assert part["samples"].keys() == part["warm_up"].keys() == names
    assert all(len(values) == 2 for values in part["samples"].values())
    wall = {name: [value["wall"] for value in v] for name, v in part["samples"].items()}
    middle = lambda pairs: sum(a / b for a, b in pairs) / 2
    bare = [a + b for a, b in zip(wall["bare_gemm"], wall["bare_attention"], strict=True)]
    expected = {
        "ratio_to_bare": (bare, wall["ours"]),
        "ratio_to_masked_peer": (wall["masked_peer"], wall["ours"]),
        "ratio_to_unmasked_peer": (wall["unmasked_peer"], wall["ours"]),
        "moe_to_dense": (wall["ours"], wall["moe"]),
    }
    for name, pair in expected.items():
        assert record[name] == pytest.approx(middle(list(zip(*pair, strict=True))))
        assert record[name] == part["ratios"][name]["median"]
    assert record["ours_tokens_per_second"] == pytest.approx(2 * 256 / sum(wall["ours"]))
    shares = [record[name] for name in SPEEDS if name.startswith("share_")]
    assert sum(shares) == pytest.approx(1)


def test_agreement_is_measured_not_assumed(record):
    for check in record["step"]["agreement"].values():
        assert check["passed"] and check["documents"] > 1
        assert all(v <= check["tolerances"][k] for k, v in check["differences"].items())


def test_memory(record):
    memory = record["step"]["memory"]
    above = memory["peak_rss_bytes"] - memory["program_rss_bytes"]
    assert record["peak_rss_ratio"] == pytest.approx(above / sum(memory["needed"].values()))
    assert record["peak_rss_ratio_whole"] > record["peak_rss_ratio"]


def spoil(monkeypatch, change):
    """A loss that goes through `change`; nothing may be timed then."""
    build = agreement.build_loss

    def off(train, ranks):
        loss_of = build(train, ranks)

        def spoiled(model, window):
            nats, router = loss_of(model, window)
            return change(nats), router

        return spoiled

    monkeypatch.setattr(agreement, "build_loss", off)
    monkeypatch.setattr(step, "run_rounds", lambda *rest: pytest.fail("a speed was measured"))


WRONG = {
    "loss": lambda nats: nats + 1.0,
    "gradient": lambda nats: nats + 0.01 * (nats - nats.detach()),
}


@pytest.mark.parametrize("what", WRONG)
def test_red_agreement_prints_no_speed(what, monkeypatch, capsys, tmp_path):
    spoil(monkeypatch, WRONG[what])
    out = tmp_path / "record.json"
    assert cli.main([*TINY, "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and not out.exists()
    errors = [line for line in printed.err.splitlines() if line.startswith("sparkgpt: error: ")]
    assert len(errors) == 1 and f": {what} by " in errors[0] and "tolerance" in errors[0]


def test_red_agreement_as_json(monkeypatch, capsys):
    spoil(monkeypatch, WRONG["loss"])
    assert cli.main([*TINY, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["agreed"] is False and record["step"].keys() == {"agreement"}
    assert not any(name in record for name in SPEEDS)


def test_nan_is_no_agreement(monkeypatch, capsys):
    monkeypatch.setattr(agreement, "_masked_loss", lambda model, window: float("nan"))
    monkeypatch.setattr(step, "run_rounds", lambda *rest: pytest.fail("a speed was measured"))
    assert cli.main([*TINY, "--json"]) == 1
    printed = capsys.readouterr()
    assert "masked_loss by inf" in printed.err
    check = json.loads(printed.out, parse_constant=pytest.fail)["step"]["agreement"]["ours"]
    assert check["differences"]["masked_loss"] is None


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--only", "speed"], "no section 'speed'"),
        (["--only", ","], "names no section"),
        (["--sizes", "0.1,x"], "--sizes"),
        (["--sizes", "0"], "above 0"),
        (["--window", "3000"], "multiple of 2048"),
        (["--longest", "8192"], "does not fit a window"),
        (["--rounds", "0"], "--rounds 0"),
        (["--warm-steps", "1"], "--warm-steps 1"),
        (["--documents", "0"], "--documents 0"),
        (["--kv-heads", "3"], "--kv-heads 3"),
        (["--moe", "--intermediate-size", "383"], "--intermediate-size 383"),
        (["--only", "step", "--data", "nowhere"], "no documents at nowhere"),
    ],
)
def test_mistakes_end_in_one_line(flags, told, capsys):
    try:
        code = cli.main(["bench", *flags])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith("sparkgpt: error: ") and told in error


def test_json_is_one_object_and_the_rest_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.setattr(command, "_run", lambda *rest: {"figures": {"help_seconds": 0.1}})
    assert cli.main(["bench", "--only", "startup", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["help_seconds"] == 0.1 and record["first_step_seconds"] is None

"""`sparkgpt compare`: matched runs are paired, others are refused with both values."""

import json
import shutil

import pytest
from synthetic import digest, edit, write_run

from sparkgpt.errors import UserError
from sparkgpt.report import compare


def run(records, *pairs, out="compare.json"):
    flags = [flag for pair in pairs for flag in ("--pair", pair)]
    compare.main(["--records", str(records), "--out", out, "--json", *flags])
    with open(out) as file:
        return json.load(file)["pairs"]


def test_pairs_by_seed(records, capsys):
    first, second = run(records, "dense:adamw", "dense:moe")
    assert first["differences"] == pytest.approx({"0": -0.1, "1": -0.11})
    assert first["losses_a"] == {"0": 2.31, "1": 2.33}
    assert (first["n"], first["wins_a"], first["verdict"]) == (2, 2, "dense lower")
    assert second["verdict"].startswith("no difference shown")
    assert json.loads(capsys.readouterr().out)["pairs"] == [first, second]


def test_curve_has_the_difference_at_each_validation(records):
    (pair,) = run(records, "dense:adamw")
    assert [point["step"] for point in pair["curve"]] == list(range(10, 101, 10))
    last = pair["curve"][-1]
    assert last["mean"] == pytest.approx(pair["mean"])
    assert last["interval"] == pytest.approx(pair["interval"])


def test_unpaired_seeds_are_named(records):
    write_run(records, "dense", 2, 2.3)
    (pair,) = run(records, "dense:adamw")
    assert (pair["n"], pair["unpaired"]) == (2, ["dense-s2"])


def test_one_seed(records):
    shutil.rmtree(records / "runs" / "moe-s1")
    (pair,) = run(records, "dense:moe")
    assert (pair["n"], pair["interval"], pair["verdict"]) == (1, None, "one pair: no verdict")


@pytest.mark.parametrize(
    "name, value",
    [
        ("train_digest", digest("other")),
        ("val_digest", digest("other")),
        ("stream_digest", digest("other")),
        ("val_tokens", 23_000),
        ("real_tokens", 700_000),
    ],
)
def test_unmatched_runs_are_refused_with_both_values(records, name, value):
    path = records / "runs" / "adamw-s1" / "summary.json"
    old = json.loads(path.read_text())[name]
    edit(path, {name: value})
    with pytest.raises(UserError, match=name) as error:
        run(records, "dense:adamw")
    assert str(value) in str(error.value) and str(old) in str(error.value)
    assert "adamw-s1" in str(error.value)


def test_seeds_of_one_row_must_share_their_data(records):
    for row in ("dense", "adamw"):
        edit(records / "runs" / f"{row}-s1" / "summary.json", {"val_digest": digest("other")})
    with pytest.raises(UserError, match="val_digest"):
        run(records, "dense:adamw")


@pytest.mark.parametrize("pair", ["dense", "dense:", ":dense", "dense:dense", "dense:nothing"])
def test_wrong_pairs(records, pair):
    with pytest.raises(UserError):
        run(records, pair)


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_run_without_a_loss_is_refused(records, loss):
    edit(records / "runs" / "dense-s0" / "summary.json", {"final_val_loss": loss})
    with pytest.raises(UserError, match="nothing to compare"):
        run(records, "dense:adamw")


def test_rows_by_name_wherever_the_profile_has_them(records, capsys):
    (records.parent / "results").mkdir()
    records = records.rename(records.parent / "results" / "cpu")
    for seed in (0, 1):
        write_run(records / "sweep", "tuned", seed, 2.2)
    compare.main(["dense", "tuned", "--json"])
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["differences"] == pytest.approx({"0": 0.11, "1": 0.13})
    with pytest.raises(UserError, match="recorded rows: adamw, dense, moe, tuned"):
        compare.main(["dense", "other"])
    with pytest.raises(UserError, match="results/gb10 holds no runs"):
        compare.main(["dense", "tuned", "--profile", "gb10"])
    write_run(records / "sweep", "dense", 0, 2.2)
    with pytest.raises(UserError, match="are two runs of one name"):
        compare.main(["dense", "tuned"])


@pytest.mark.parametrize("seeds", [4, 5])
def test_no_difference_is_claimed_from_five_pairs_on(tmp_path, seeds):
    for seed in range(seeds):
        write_run(tmp_path, "a", seed, 2.3)
        write_run(tmp_path, "b", seed, 2.3 + 0.01 * (-1) ** seed)
    (pair,) = run(tmp_path, "a:b", out=str(tmp_path / "compare.json"))
    assert pair["verdict"].startswith("no difference shown")
    assert ("too few pairs" in pair["verdict"]) == (seeds < 5)


@pytest.mark.parametrize("rows", [[], ["dense"], ["dense", "moe", "adamw"]])
def test_two_rows_or_pairs(records, rows):
    with pytest.raises((SystemExit, UserError)):
        compare.main(["--records", str(records), *rows])

"""Every profile plans all its rows on an empty tree; a mistake in one is a single clear line."""

import pytest

from sparkgpt.flags import parse_train
from sparkgpt.pipeline.profiles import _shape_flags

ROWS = {
    "cpu": {"train": 6, "plot": 7, "coordinates": 1, "export": 6, "check_hf": 6, "check_mlx": 6},
    "smoke": {"train": 2, "plot": 6, "export": 2, "check_hf": 2, "check_mlx": 2},
    "gpu": {"train": 4, "fetch": 1},
    "gb10": {"train": 11, "fetch": 2, "verify": 2},
}
STAGES = (
    "fetch verify prepare cache autotune ready train compare export check_hf check_mlx tables plot "
    "rulegraph page"
)


@pytest.mark.parametrize("profile", ROWS)
def test_dry_run_lists_every_stage_and_row(profile, fresh):
    jobs = fresh.planned(profile=profile)
    assert set(jobs) - {"coordinates"} == set(STAGES.split())
    assert {rule: jobs[rule] for rule in ROWS[profile]} == ROWS[profile]


def test_sweep_is_a_target_of_its_own(fresh):
    table = (fresh.root / "workflow/config/cpu.sweep.tsv").read_text().splitlines()
    rows = [line for line in table if not line.startswith("#")][1:]
    jobs = fresh.planned("sweep", profile="cpu")
    assert jobs["train"] == len(rows) > 0 and "export" not in jobs


def test_lint(fresh):
    code, output = fresh.snakemake("--lint", profile="cpu")
    assert code == 0, output
    assert "good condition" in output


def error_of(project, profile="wrong"):
    code, output = project.snakemake("-n", profile=profile)
    lines = [line for line in output.splitlines() if not line.startswith("Using workflow")]
    assert code and len(lines) == 1, output
    return lines[0]


def test_unknown_profile(fresh):
    assert "choose from cpu, gb10, gpu, smoke" in error_of(fresh, "nothing")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"colour": "blue"}, "'colour' was unexpected"),
        ({"checks": ["gguf"]}, "checks: 0: 'gguf' is not one of"),
        ({"train": {"seed": 3}}, "'seed'"),
        ({"train": {"model-depth": 3}}, "--model-depth"),
        ({"train": {"attention-heads": 4, "kv-heads": 3}}, "--kv-heads 3 does not divide"),
        ({"compare": ["dense:sparse"]}, "'dense:sparse' names a row"),
        ({"prepare": None}, "prepare: None is not of type 'object'"),
    ],
)
def test_mistake_in_a_profile(changes, reason, fresh):
    fresh.configure("wrong", **changes)
    error = error_of(fresh)
    assert error.startswith("sparkgpt: error: ") and reason in error


@pytest.mark.parametrize(
    "line, reason",
    [
        ("dense\tDense\tzero\t", "'zero' does not match"),
        ("dense\tDense\t0\t--model-layers 0", "--model-layers 0: must be at least 1"),
        ("dense\tDense\t0\tmuon", "'muon' follows no --flag"),
        ("dense\tDense\t0\t\nmoe\tMoE\t1\t\nmoe\tMoE\t0\t", "row 'moe' is in its tables twice"),
        ("../dense\tDense\t0\t", "does not match"),
        ("dense\tDense", "None is not of type 'string'"),
    ],
)
def test_mistake_in_a_runs_table(line, reason, fresh):
    fresh.configure("wrong", compare=[])
    table = fresh.root / "workflow/config/wrong.runs.tsv"
    table.write_text(f"row\tlabel\tseeds\tflags\n{line}\n")
    assert reason in error_of(fresh)


def test_autotune_is_told_which_layers_are_dense():
    """Their shapes are tuned beside the experts'."""
    flags = "--num-experts 8 --mlp-only-layers 0,3 --decoder-sparse-step 2 --model-layers 4"
    model = parse_train(flags.split(), "a run")[0]
    assert parse_train(_shape_flags(model).split(), "autotune")[0] == model

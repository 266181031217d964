"""Records folders to report on."""

import pytest
from synthetic import ROWS, write_run


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A records folder of three rows with two seeds each; the working folder is its parent."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "made"
    for row, (parameters, active, losses, experts) in ROWS.items():
        for seed, loss in losses.items():
            write_run(folder, row, seed, loss, parameters, active, experts)
    return folder


@pytest.fixture
def rows(tmp_path):
    """A runs table that lists one row more than was run."""
    path = tmp_path / "cpu.runs.tsv"
    path.write_text(
        "row\tlabel\tseeds\tflags\n"
        "dense\tdense, Muon\t0,1\t\n"
        "moe\tMoE 4x2\t0,1\t--num-experts 4\n"
        "adamw\tdense, AdamW\t0,1\t\n"
        "large\tdense 0.6B\t0,1\t--model-layers 28\n"
    )
    return path

"""`sparkgpt kernels`: what every configuration takes of a device, and that a bad one is noticed."""

import importlib.util
import json

import pytest
from helpers.interpreted import interpreted

from sparkgpt import cli, kernels
from sparkgpt.ops.kernels.specimen import FAMILIES

pytest.importorskip("triton")

pytestmark = pytest.mark.cpu("compiles for sm_121 on any machine, without its GPU")
FIELDS = {*kernels.COLUMNS, "problems", "ok"}

BAD = """
import dataclasses
from sparkgpt.ops.kernels.specimen import Config
from sparkgpt.ops.kernels import swiglu

FAMILY = "bad"

def specimens():
    name = "swiglu_wgrad"
    good = next(specimen for specimen in swiglu.specimens() if specimen.name == name)
    change = lambda **values: dataclasses.replace(good, **values)
    wide = {"BLOCK_F": 128, "BLOCK_D": 128, "BLOCK_R": 32}
    return [
        change(config=Config(wide, num_warps=4, num_stages=2)),
        change(config=Config(good.config.tiles, num_warps=8, num_stages=9)),
        change(signature={**good.signature, "x_ptr": "bf16"}),
        good,
    ]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing compiled earlier counts; and a variable that would turn kernels into Python."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def bad_family(tmp_path, monkeypatch):
    """A family with three configurations that must not be shipped, and a good one."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "family.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "FAMILIES", ("bad.family",))


def test_every_shipped_configuration_fits_sm_121(capsys):
    code = cli.main(["kernels", "--family", *FAMILIES, "--json"])
    record = json.loads(capsys.readouterr().out)
    rows = record["kernels"]
    assert [row["problems"] for row in rows if not row["ok"]] == []
    assert code == 0 and record["ok"]
    assert {row["family"] for row in rows} == set(FAMILIES)
    for row in rows:
        assert set(row) == FIELDS and row["arch"] == 121
        assert 0 < row["registers"] <= 255 and row["shared_bytes"] <= 101_376
        assert row["stack_bytes"] == row["local_bytes"] == 0
    names = [tuple(map(str, (row[name] for name in kernels.COLUMNS[:7]))) for row in rows]
    assert len(set(names)) == len(names)


def test_a_bad_configuration_turns_the_table_red(bad_family, capsys):
    assert cli.main(["kernels"]) == 1
    out, errors = capsys.readouterr()
    lines = [line for line in errors.splitlines() if line.startswith("sparkgpt: error: ")]
    expected = ("registers spill", "shared memory of 101,376", "doesn't compile")
    for line, words in zip(lines, expected, strict=True):
        assert words in line and "bad swiglu_wgrad bf16" in line and "sm_121" in line
    verdicts = ["NO: " in line for line in out.splitlines()[1:]]
    assert verdicts == [True, True, True, False]


def test_a_kernel_for_the_interpreter_is_no_kernel():
    from sparkgpt.ops.kernels.compiled import usage_of
    from sparkgpt.ops.kernels.specimen import Config, Specimen

    kernel = interpreted("swiglu")._swiglu_forward
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        usage_of(Specimen(kernel, {}, {}, Config({})), 121)


def test_limits_are_those_of_the_device():
    from sparkgpt.ops.kernels.compiled import problems_of

    usage = {"shared_bytes": 110_000, "registers": 255, "stack_bytes": 8, "local_bytes": 0}
    assert [len(problems_of(usage, arch)) for arch in (90, 100, 120, 121)] == [0, 0, 2, 2]


def test_without_triton_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["kernels"]) == 2
    assert "pip install triton" in capsys.readouterr().err

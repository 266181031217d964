"""The ledger of accepted changes, and the record that a job leaves."""

import json
import os
import time

import pytest

from sparkgpt.errors import UserError
from sparkgpt.pipeline import record
from sparkgpt.pipeline.ledger import Ledger


def entry(job, name, old="a", new="b", reason="none changes"):
    change = {"job": job, "name": name, "old": old, "new": new}
    return {"when": "2030-01-01", "by": "Ada", "reason": reason, "changes": [change]}


FLAGS = "--log-every 2 --target-tokens 9"


@pytest.mark.parametrize(
    "written",
    [
        entry("train-moe-s0", "data"), entry("fetch-x", "source"), entry("prepare", "sources"),
        entry("prepare", "config", "--seed 0", "--seed 1"), entry("compare", "pairs"),
        entry("tables", "runs"), entry("fetch-x", "code"), entry("other", "code"),
        entry("train-moe-s0", "config", FLAGS, FLAGS.replace("9", "8")),
        entry("train-moe-s0", "config", "--device cpu", "--device cuda"),
        entry("train-moe-s0", "config", "--a 'b", "--a c"),
        entry("train-moe-s0", "code", 1, 2), entry("train-moe-s0", "code", reason=" "),
    ],
)  # fmt: skip
def test_ledger_refuses_what_accept_does_not_write(written, tmp_path):
    good = json.dumps(entry("train-moe-s0", "code"))
    (tmp_path / "accepted.jsonl").write_text(f"{good}\n{json.dumps(written)}\n")
    with pytest.raises(UserError, match="accepted.jsonl line 2"):
        Ledger.read(tmp_path)


def test_ledger_takes_what_accept_writes(tmp_path):
    ledger = Ledger.read(tmp_path)
    new = FLAGS.replace("2", "3")
    for one in (entry("train-moe-s0", "config", FLAGS, new), entry("sweep/train-a-s0", "code")):
        ledger.add(one)
    again = Ledger.read(tmp_path)
    assert len(again.entries) == 2
    assert again.resolved("train-moe-s0", "config", new) == FLAGS
    assert again.equals("train-moe-s0", "config", FLAGS) == [FLAGS, new]


def test_two_writers_lose_no_entry(tmp_path):
    one, other = Ledger.read(tmp_path), Ledger.read(tmp_path)
    one.add(entry("prepare", "code"))
    other.add(entry("cache", "code"))
    jobs = [e["changes"][0]["job"] for e in Ledger.read(tmp_path).entries]
    assert jobs == ["prepare", "cache"]


@pytest.mark.parametrize("after", [-5, 5])
def test_input_written_while_the_job_ran(after, tmp_path):
    started = time.time() - 60
    source, made, path = (tmp_path / name for name in ("in.txt", "out.txt", "job.json"))
    for file in (source, made):
        file.write_text("text")
    os.utime(source, (started + after,) * 2)
    call = [str(path), "--started", str(started), "--values", "code=1"]
    call += ["--outputs", str(made), "--inputs", str(source)]
    if after < 0:
        assert record.main(call) == 0 and str(source) in json.loads(path.read_text())["inputs"]
    else:
        with pytest.raises(UserError, match="in.txt was written while") as error:
            record.main(call)
        assert error.value.exit_code == 1 and not path.exists()

"""What reruns after which change, in a checkout where the pipeline really ran.

The tests plan after an edit and take it back, or run what little is stale.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager

import pytest

from sparkgpt.fingerprint import ENTRIES, WITHOUT_RESULT, modules_of

RECORDS = "results/tiny"
AFTER_TRAINING = {"export": 2, "check_hf": 2, "check_mlx": 2, "compare": 1, "tables": 1, "plot": 6,
                  "page": 1}  # fmt: skip


AFTER_EXPORT = {"export": 2, "check_hf": 2, "check_mlx": 2, "tables": 1, "page": 1}


@contextmanager
def edited(project, path, text="\n# edited\n"):
    """An edit that is taken back."""
    file = project.root / path
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(before + text.encode())
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_everything_was_made(built):
    assert set(built.first_jobs) >= {"fetch", "verify", "prepare", "cache", "train", "plot"}
    for run in ("dense-s0", "moe-s0"):
        folder = built.root / RECORDS / "runs" / run
        for name in ("check_hf.json", "check_mlx.json"):
            assert json.loads((folder / name).read_text())["ok"]
        record = json.loads((folder / "run.json").read_text())
        assert record["weights_sha256"] and (folder / "hf" / "config.json").exists()
    assert "Dense" in (built.root / RECORDS / "tables.md").read_text()


def test_digests_cover_what_each_stage_imported(built):
    stages = {"check-export": "check", "sparkgpt.train": "train", "sparkgpt.export.probe": "check"}
    seen = set()
    for command, modules in built.imported:
        names = [word for word in command if word in stages or word in ENTRIES]
        if (
            "sparkgpt.pipeline.record" in command
        ):  # it runs after each stage, in a process of its own
            continue
        if modules and names:
            stage = stages.get(names[0], names[0])
            seen.add(stage)
            missing = set(modules) - set(modules_of(stage)) - WITHOUT_RESULT
            assert not missing, (command, missing)
    assert seen == set(ENTRIES) - {"coordinates"}


def test_second_start_has_nothing_to_do(built):
    code, output = built.snakemake("--cores", "2")
    assert code == 0 and "Nothing to be done" in output


def test_other_cores_change_nothing(built):
    assert built.planned("--cores", "1") == {}


def test_touching_everything_changes_nothing(built):
    for folder in ("results", "sparkgpt", "workflow"):
        for path in sorted((built.root / folder).rglob("*"), reverse=True):
            os.utime(path)
    os.utime(built.root / "documents.jsonl")
    assert built.planned() == {}


def test_deleted_plot_is_the_only_one_drawn(built):
    (built.root / RECORDS / "plots" / "loss.svg").unlink()
    assert built.run() == ["page", "plot"]


@pytest.mark.parametrize(
    "module, stale",
    [
        ("cli", {}),
        ("progress", {}),
        ("__init__", {}),
        ("report/theme", {"plot": 6, "page": 1, "rulegraph": 1}),
        ("report/tables", {"tables": 1}),
        ("report/page", {"page": 1}),
        ("report/graph", {"rulegraph": 1, "page": 1}),
        ("report/matched", {"compare": 1, "tables": 1, "plot": 6, "page": 1}),
        ("export/judge", {"check_hf": 2, "check_mlx": 2, "tables": 1, "page": 1}),
        ("export/tokenizer", AFTER_EXPORT),
        ("autotune", {"autotune": 1, "ready": 1}),
        ("data/sources", {"verify": 1, "prepare": 1, "cache": 1, "ready": 1}),
        ("train/step", {"train": 2} | AFTER_TRAINING),
        ("model/transformer", {"train": 2} | AFTER_TRAINING),
    ],
)
def test_edit_of_a_module(module, stale, built):
    with edited(built, f"sparkgpt/{module}.py"):
        assert built.planned() == stale
    assert built.planned() == {}


def test_flag_of_one_row_restales_that_row(built):
    table = built.root / "workflow/config/tiny.runs.tsv"
    before = table.read_text()
    table.write_text(before.replace("--num-experts 4", "--num-experts 2"))
    assert built.planned() == {
        "train": 1, "export": 1, "check_hf": 1, "check_mlx": 1,
        "compare": 1, "tables": 1, "plot": 6, "page": 1,
    }  # fmt: skip
    table.write_text(before)
    assert built.planned() == {}


def test_order_of_flags_is_no_change(built):
    table = built.root / "workflow/config/tiny.runs.tsv"
    before = table.read_text()
    flags = "--num-experts 4 --num-experts-per-tok 2"
    assert flags in before
    table.write_text(before.replace(flags, "--num-experts-per-tok 2 --num-experts 4"))
    # The table itself is an input of what shows its labels.
    assert built.planned().keys() <= {"tables", "plot", "page"}
    table.write_text(before)


def test_lock_restales_what_uses_libraries(built):
    lock = built.root / "requirements" / "base.lock.txt"
    before = lock.read_text()
    stale = {}
    for library in ("matplotlib", "orjson", "pulp"):
        lock.write_text(re.sub(rf"^{library}==\S+", f"{library}==0.0.1", before, flags=re.M))
        stale[library] = built.planned()
    lock.write_text(before)
    assert stale["matplotlib"] == {"plot": 6, "page": 1, "rulegraph": 1}
    assert stale["orjson"] == {"prepare": 1, "cache": 1, "ready": 1}
    assert stale["pulp"] == {}


def test_data_rebuilt_to_the_same_bytes_trains_nothing(built):
    built.edit("sparkgpt/data/prepare.py")
    assert built.run() == ["cache", "prepare", "ready"]
    assert built.planned() == {}


def test_edit_of_everything_needs_one_start(built):
    built.edit("sparkgpt/errors.py")
    built.run()
    assert built.planned() == {}


def test_deleted_run_is_adopted_from_its_work_folder(built):
    run = built.root / RECORDS / "runs" / "dense-s0"
    before = json.loads((run / "run.json").read_text())
    shutil.rmtree(run)
    assert built.run(f"{RECORDS}/runs/dense-s0/run.json") == ["train"]
    after = json.loads((run / "run.json").read_text())
    assert after["weights_sha256"] == before["weights_sha256"]
    assert after["attempts"] == before["attempts"]
    built.run()


def test_other_documents_train_anew(built):
    """Last: it changes what the others planned with."""
    config = built.root / "workflow/config/tiny.yaml"
    config.write_text(config.read_text().replace("val-bytes: 2000", "val-bytes: 3000"))
    ran = built.run("--until", "train")
    assert ran == ["cache", "prepare", "ready", "train", "train"]

"""Synthetic records: whole run folders with figures that a test can compute by hand."""

import hashlib
import json
import math
from importlib.metadata import version
from pathlib import Path

ROWS = {
    # row: (parameters, active, final losses by seed, experts)
    "dense": (1_234_567, 1_234_567, {0: 2.31, 1: 2.33}, 0),
    "moe": (2_345_678, 1_240_000, {0: 2.30, 1: 2.34}, 4),
    "adamw": (1_234_567, 1_234_567, {0: 2.41, 1: 2.44}, 0),
}
STEPS = range(10, 101, 10)
TORCH = version("torch").partition("+")[0]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def summary(row, seed, loss, parameters=10, active=10):
    speed = 12_000 + 100 * seed
    return {
        "run": f"{row}-s{seed}", "row": row, "seed": seed, "steps": 100, "tokens_per_batch": 8192,
        "accumulate": 1, "world_size": 1, "real_tokens": 800_000, "window_tokens": 819_200,
        "utilization": 800_000 / 819_200, "parameters": parameters, "active_parameters": active,
        "window_tokens_per_second": speed, "real_tokens_per_second": speed * 800 / 819.2,
        "tflops_per_second": 0.1, "peak_memory_bytes": None, "wall_seconds": 70.0,
        "initial_loss": math.log(259), "final_train_loss": loss - 0.02, "final_val_loss": loss,
        "final_val_bpb": loss / math.log(2), "val_tokens": 24_000, "train_digest": digest("train"),
        "val_digest": digest("val"), "stream_digest": digest(f"stream {seed}"),
        "weights_sha256": digest(f"{row} {seed}"), "optimizer": "muon", "device": "cpu",
        "threads": 2,
    }  # fmt: skip


def metrics(loss, experts):
    start = math.log(259)
    lines = []
    for step in STEPS:
        value = loss + (start - loss) * math.exp(-step / 20) * (1 - step / 100)
        train = {
            "kind": "train", "step": step, "train/loss": value + 0.03 * math.sin(step * loss),
            "real_tokens": 8000 * step, "utilization": 0.97 + 0.002 * math.cos(step),
            "lr/muon": 4e-3 * (1 - step / 110), "lr/adamw": 5e-4 * (1 - step / 110),
        }  # fmt: skip
        if experts:
            load = [[10 + e + layer for e in range(experts)] for layer in range(2)]
            train |= {"router/load": load, "router/cv": 1 / step, "router/entropy": 1.3}
        lines.append(train)
        lines.append(
            {"kind": "val", "step": step, "val/loss": value, "val/bpb": value / math.log(2),
             "real_tokens": 8000 * step, "seconds": step / 2.0}
        )  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def check(run, library, loss):
    return {
        "run": run, "library": library, "version": "1.2.3", "max_logit_difference": 2.5e-5,
        "tolerance": 1e-4, "missing_keys": [], "unexpected_keys": [], "mismatched_keys": [],
        "greedy_equal": True, "tokenizer_round_trips": 40,
        "library_val_loss": loss + 1e-6 if library == "transformers" else None,
        "final_val_loss": loss, "ok": True,
    }  # fmt: skip


def provenance(values):
    return {
        "schema": 1, "run": values["run"], "argv": ["sparkgpt", "train", "--seed", "0"],
        "tree": {"commit": "c0ffee" * 6, "hash": "abc123" * 6, "dirty": False},
        "lock": "f" * 64, "image": None,
        "versions": {"python": "3.11.9", "torch": TORCH}, "device": {"type": "cpu"},
        "platform": {"system": "Linux", "machine": "x86_64", "cpu": "Some CPU", "threads": 2,
                     "libc": "glibc 2.36"},
        "weights_sha256": values["weights_sha256"],
    }  # fmt: skip


def write_run(records, row, seed, loss, parameters=10, active=10, experts=0):
    values = summary(row, seed, loss, parameters, active)
    folder = records / "runs" / values["run"]
    folder.mkdir(parents=True)
    edit(folder / "summary.json", values)
    edit(folder / "run.json", provenance(values))
    edit(folder / "config.json", {"arguments": {"train_path": "results/cpu/data/train.cache"}})
    edit(folder / "check_hf.json", check(values["run"], "transformers", loss))
    edit(folder / "check_mlx.json", check(values["run"], "mlx", loss))
    (folder / "metrics.jsonl").write_text(metrics(loss, experts))
    return folder


def write_inputs(records):
    """What a version takes beside the records: the profile, the lock files, the data's manifests;
    in the working folder, and named after the records."""
    config, pins = Path("workflow/config"), Path("requirements")
    for folder in (config, pins, records / "data/train.cache", records / "data/val.cache"):
        folder.mkdir(parents=True, exist_ok=True)
    (config / f"{records.name}.yaml").write_text("sources: {}\n")
    table = "row\tlabel\tseeds\n" + "".join(f"{row}\t{row}\t0,1\n" for row in ROWS)
    (config / f"{records.name}.runs.tsv").write_text(table)
    (pins / "base.lock.txt").write_text("numpy==0 \\\n    --hash=sha256:00\n")
    (pins / "torch.txt").write_text("torch==0\n")
    edit(records / "data/manifest.json", {})
    for split in ("train", "val"):
        edit(records / f"data/{split}.cache/manifest.json", {"digest": digest(split)})
    (records / "index.html").write_text("<!doctype html><title>page</title>")


def edit(path, values):
    """Write `values` over those of a JSON file, which need not exist."""
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))

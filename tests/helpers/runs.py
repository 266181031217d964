"""Tiny training runs on synthetic documents of our own."""

import json
import random
from pathlib import Path

from sparkgpt.checkpoint import valid_steps
from sparkgpt.files import read_section
from sparkgpt.fingerprint import fingerprint

WORDS = "alpha beta gamma delta whole document never cut window stream näher 好的".split()
SHAPE = (
    "--model-layers 2 --model-dim 32 --attention-heads 2 --kv-heads 1 --head-dim 16 "
    "--intermediate-size 64 --max-position-embeddings 512 --tokens-per-batch 1024 "
    "--device cpu --threads 1"
).split()
MOE = "--num-experts 4 --moe-intermediate-size 32".split()


def write_documents(path: Path, count: int, seed: int, longest: int = 40) -> Path:
    """A JSONL file of seeded random sentences."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def flags(folder: Path, name: str = "dense-s0", *more: str) -> list[str]:
    """Flags of a run of 24 steps into folder/runs, its documents made on first use."""
    train, val = folder / "train.jsonl", folder / "val.jsonl"
    if not train.exists():
        write_documents(train, 200, 0)
        write_documents(val, 12, 1)
    paths = ["--train-path", train, "--val-path", val, "--out-dir", folder / "runs"]
    size = ["--target-tokens", "24000", "--log-every", "4", "--run-name", name, "--save-final"]
    return [str(x) for x in (*SHAPE, *paths, *size, *more)]


def weights(run: Path) -> bytes:
    """The final weights file of a run, whole."""
    return (run / "model_final.safetensors").read_bytes()


def whole_steps(run: Path) -> set[int]:
    """Steps of the valid checkpoints of a run that has a config.json."""
    fixed = read_section(run / "config.json", "fingerprint")
    return set(valid_steps(run, fingerprint(fixed)))


def timeless(run: Path) -> list[dict]:
    """metrics.jsonl without its clock fields."""
    clock = ("seconds", "per_second")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(clock)} for line in lines]

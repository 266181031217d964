"""Runs on disk: resumable checkpoints, final weights, and what guards them.

A checkpoint `step<N>/` holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (sha256 of the other three); it appears by one rename.
"""

import re
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgpt.config import ModelConfig, from_values
from sparkgpt.errors import UserError
from sparkgpt.files import read_json, replacing, replacing_directory, sha256_file, write_json
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.hybrid import HybridOptimizer

FINAL_WEIGHTS = "model_final.safetensors"


def save_step(
    folder: Path, step: int, model: Transformer, optimizer: HybridOptimizer, state: dict
) -> Path:
    """Write `folder`/step<step>/ and return it. `state` is the JSON of everything but tensors."""
    path = folder / f"step{step}"
    with replacing_directory(path) as temporary:
        save_file(_on_cpu(model.state_dict()), temporary / "model.safetensors")
        save_file(_on_cpu(optimizer.state_dict()), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {"step": step, **state})
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors makes its files private
        digests = {file.name: sha256_file(file) for file in sorted(temporary.iterdir())}
        write_json(temporary / "manifest.json", {"format": 1, "sha256": digests})
    return path


def is_valid(path: Path) -> bool:
    """Whether every file of a checkpoint is there with the sha256 that its manifest gives."""
    try:
        digests = read_json(path / "manifest.json")["sha256"]
        return all(sha256_file(path / name) == digest for name, digest in digests.items())
    except (UserError, OSError, KeyError, AttributeError):
        return False


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, newest first, valid or not."""
    found = []
    for path in folder.glob("step*"):
        match = re.fullmatch(r"step(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest_valid(folder: Path, at_most: int | None = None) -> tuple[int, Path] | None:
    """The newest checkpoint whose digests hold (up to step `at_most`); damaged ones are named."""
    for step, path in steps_in(folder):
        if at_most is not None and step > at_most:
            continue
        if is_valid(path):
            return step, path
        print(f"{path}: damaged or incomplete, passed over", file=sys.stderr)
    return None


def prune(folder: Path, keep_last: int) -> None:
    """Remove checkpoints (and their hf_step twins) older than the `keep_last` newest valid ones."""
    valid = [path for _, path in steps_in(folder) if is_valid(path)]
    for path in valid[keep_last:]:
        shutil.rmtree(path)
        shutil.rmtree(folder / f"hf_{path.name}", ignore_errors=True)


def load_step(path: Path, model: Transformer, optimizer: HybridOptimizer) -> dict:
    """Restore model and optimizer from a checkpoint; returns its state.json."""
    model.load_state_dict(load_file(path / "model.safetensors"))
    optimizer.load_state_dict(load_file(path / "optimizer.safetensors"))
    return read_json(path / "state.json")


def check_fingerprint(path: Path, saved: dict, current: dict) -> None:
    """UserError naming each value that differs between a saved run's fingerprint and this one."""
    differing = [
        f"{name} was {saved.get(name)!r}, is {current.get(name)!r}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(differing)}; "
            "restore these values, or choose another --run-name"
        )


def save_final(folder: Path, model: Transformer) -> str:
    """Write `folder`/model_final.safetensors; returns its sha256."""
    with replacing(folder / FINAL_WEIGHTS) as temporary:
        save_file(_on_cpu(model.state_dict()), temporary)
    return sha256_file(folder / FINAL_WEIGHTS)


def read_run(folder: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Model config and float32 weights (native names) of a finished run or of one checkpoint.

    `folder` is a run folder with model_final.safetensors, or a step<N>/ folder inside one.
    """
    folder = Path(folder)
    weights = folder / FINAL_WEIGHTS
    home = folder
    if not weights.exists() and (folder / "model.safetensors").exists():
        weights, home = folder / "model.safetensors", folder.parent
    if not weights.exists():
        raise UserError(f"{folder}: no {FINAL_WEIGHTS} there; train with --save-final")
    config = from_values(ModelConfig, read_json(home / "config.json")["model"])
    return config, load_file(weights)


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}

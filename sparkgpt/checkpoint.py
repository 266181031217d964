"""Runs on disk: resumable checkpoints, final weights, and what guards them.

A checkpoint `step<N>/` holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (the run it belongs to, sha256 of the other three); it appears by one rename.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgpt.config import ModelConfig, from_values
from sparkgpt.errors import UserError
from sparkgpt.files import (
    read_json,
    read_section,
    replacing,
    replacing_directory,
    sha256_file,
    write_json,
)
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.hybrid import HybridOptimizer

FINAL_WEIGHTS = "model_final.safetensors"
PARTS = {"model.safetensors", "optimizer.safetensors", "state.json"}


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file that appears by rename. UserError when the disk is full."""
    with replacing(path) as temporary:  # save_file alone would make the file private, too
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise UserError(
                f"cannot write {path}: {error}; free space or choose another place", exit_code=1
            ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. UserError when missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; restore it or make it again") from error


def save_step(
    folder: Path, step: int, run: str, model: Transformer, optimizer: HybridOptimizer, state: dict
) -> str:
    """Write `folder`/step<step>/ of the run with fingerprint digest `run`.

    `state` is the JSON of everything but tensors. Returns the digest of the tensors, which is the
    same on every rank.
    """
    with replacing_directory(folder / f"step{step}") as temporary:
        write_tensors(temporary / "model.safetensors", _on_cpu(model.state_dict()))
        write_tensors(temporary / "optimizer.safetensors", _on_cpu(optimizer.state_dict()))
        write_json(temporary / "state.json", {"step": step, **state})
        digests = {name: sha256_file(temporary / name) for name in sorted(PARTS)}
        write_json(temporary / "manifest.json", {"format": 2, "run": run, "sha256": digests})
    return _tensors_digest(digests)


def inspect_step(path: Path, run: str) -> str:
    """The digest of a checkpoint's tensors, once every file has the sha256 that its manifest gives.

    UserError when it is damaged, or belongs to a run of another fingerprint digest than `run`.
    """
    digests = read_section(path / "manifest.json", "sha256")
    if digests.keys() != PARTS:
        raise UserError(f"{path}: damaged or incomplete")
    for name, digest in digests.items():
        if not (path / name).is_file() or sha256_file(path / name) != digest:
            raise UserError(f"{path}: damaged or incomplete ({name})")
    if read_json(path / "manifest.json").get("run") != run:
        raise UserError(f"{path}: belongs to another run")
    return _tensors_digest(digests)


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, newest first, valid or not."""
    found = []
    for path in folder.glob("step*"):
        match = re.fullmatch(r"step(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def valid_steps(folder: Path, run: str) -> dict[int, str]:
    """Step -> digest of the tensors, of each checkpoint of this run that is whole; others are
    named on stderr."""
    valid = {}
    for step, path in steps_in(folder):
        try:
            valid[step] = inspect_step(path, run)
        except UserError as error:
            print(f"{error}, passed over", file=sys.stderr)
    return valid


def prune(folder: Path, keep_last: int, valid: Iterable[int]) -> None:
    """Keep the `keep_last` newest of the `valid` steps; remove everything older, with its twins."""
    newest = sorted(valid, reverse=True)[:keep_last]
    if newest:
        remove_steps(folder, lambda step: step < newest[-1])


def remove_steps(folder: Path, unwanted: Callable[[int], bool]) -> None:
    """Remove the checkpoints, valid or not, and hf_step twins of unwanted steps. Only for the
    holder of the folder's lock."""
    for path in folder.iterdir():
        match = re.fullmatch(r"(?:hf_)?step(\d+)", path.name)
        if match and unwanted(int(match[1])):
            shutil.rmtree(path)


def load_step(path: Path, model: Transformer, optimizer: HybridOptimizer) -> dict:
    """Restore model and optimizer from a checkpoint; returns its state.json."""
    model.load_state_dict(read_tensors(path / "model.safetensors"))
    optimizer.load_state_dict(read_tensors(path / "optimizer.safetensors"))
    return read_json(path / "state.json")


def differences(there: dict, here: dict) -> str:
    """`name was X, is Y` of each value in which two fingerprints differ; empty when none does."""
    return "; ".join(
        f"{name} was {there.get(name)!r}, is {here.get(name)!r}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    )


def check_fingerprint(path: Path, saved: dict, current: dict) -> None:
    """UserError naming each value that differs between a saved run's fingerprint and this one."""
    if differing := differences(saved, current):
        raise UserError(
            f"{path} belongs to another run: {differing}; "
            "restore these values, or choose another --run-name"
        )


def save_final(folder: Path, model: Transformer) -> str:
    """Write `folder`/model_final.safetensors; returns its sha256."""
    write_tensors(folder / FINAL_WEIGHTS, _on_cpu(model.state_dict()))
    return sha256_file(folder / FINAL_WEIGHTS)


def read_run(folder: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Model config and float32 weights (native names) of a finished run or of one checkpoint.

    `folder` is a run folder with model_final.safetensors, or a step<N>/ folder inside one.
    UserError when it is neither, or damaged.
    """
    folder = Path(folder)
    weights, home = folder / FINAL_WEIGHTS, folder
    if not weights.exists() and (folder / "model.safetensors").exists():
        weights, home = folder / "model.safetensors", folder.parent
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give a run's folder")
    if not weights.exists():
        saved = ", ".join(path.name for _, path in steps_in(folder)) or "no checkpoint"
        raise UserError(
            f"{folder} has no {FINAL_WEIGHTS} (it has {saved}); train with --save-final"
        )
    values = read_section(home / "config.json", "model")
    try:
        config = from_values(ModelConfig, values)
    except TypeError as error:
        raise UserError(f"{home / 'config.json'}: {error}; restore it") from error
    return config, read_tensors(weights)


def _tensors_digest(digests: dict[str, str]) -> str:
    return f"{digests['model.safetensors']} {digests['optimizer.safetensors']}"


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}

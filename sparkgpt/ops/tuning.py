"""Measuring our kernels' configurations against each other, at one shape each."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sparkgpt.config import ModelConfig
from sparkgpt.ops.kernels.specimen import Config, Tunable
from sparkgpt.progress import progress

REPEATS = 15
UNITS = 4  # roundings of the largest value that a sum in another order may differ by


def tunables(models: Iterable[ModelConfig], positions: int, device: torch.device) -> list[Tunable]:
    """Every kernel with a choice, at the shapes of these models, each once."""
    from sparkgpt.ops.tunables import of_model  # needs triton

    found = [one for model in models for one in of_model(model, positions, device)]
    return list({one.key: one for one in found}.values())


def tune_all(found: list[Tunable], device: torch.device) -> dict[str, dict]:
    """The record's entry of each, by key."""
    entries = {}
    with progress("tuning kernels", len(found)) as bar:
        for one in found:
            entries[one.key] = tune(one, device)
            bar.advance(1, one.key)
    return entries


def tune(one: Tunable, device: torch.device) -> dict:
    """Time a kernel in its default and each candidate; the fastest of those that agree wins.

    A candidate's outputs may differ from the default's by UNITS roundings of its largest value: the
    order of a sum is free, a wrong or missing number isn't. One that can't be compiled or launched
    here (too much shared memory, too many registers) is recorded with its reason.
    """
    reference = [output.clone() for output in one.run(one.default)]
    candidates: dict[str, dict] = {}
    for config in dict.fromkeys((one.default.text, *(c.text for c in one.candidates))):
        candidates[config] = _measured(one, Config.parse(config), reference, device)
    allowed = {text: c["median_ms"] for text, c in candidates.items() if c.get("agrees")}
    winner = min(allowed, key=allowed.__getitem__, default=one.default.text)
    return {"winner": winner, "default": one.default.text, "candidates": candidates}


def _measured(one: Tunable, config: Config, reference: list[Tensor], device: torch.device) -> dict:
    try:
        agrees = all(map(close, one.run(config), reference))
        times = milliseconds(lambda: one.run(config), device)
    except Exception as error:  # triton's errors share no base class
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    return {"median_ms": round(statistics.median(times), 4), "agrees": agrees}


def close(ours: Tensor, reference: Tensor) -> bool:
    """Whether outputs are finite and equal to UNITS roundings of the largest value."""
    if not ours.numel():
        return ours.shape == reference.shape
    largest = reference.double().abs().max().item()
    difference = (ours.double() - reference.double()).abs().max().item()
    exact = not ours.is_floating_point()
    allowed = 0.0 if exact else UNITS * torch.finfo(ours.dtype).eps * largest
    return difference <= allowed  # False for NaN


def milliseconds(
    action: Callable[[], object], device: torch.device, repeats: int = REPEATS
) -> list[float]:
    """Duration of each repetition after three to warm up: on CUDA between two events, without what
    the host takes to launch it once several wait in line."""
    for _ in range(3):
        action()
    if device.type != "cuda":
        return [_wall_milliseconds(action) for _ in range(repeats)]
    pairs = []
    torch.cuda.synchronize(device)
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]


def _wall_milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3

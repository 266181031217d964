"""What an interrupted run must share with an uninterrupted one."""

from itertools import zip_longest
from pathlib import Path

from helpers.runs import timeless

from sparkgpt.checkpoint import FINAL_WEIGHTS, steps_in
from sparkgpt.files import read_json
from sparkgpt.train.finish import PUBLISHED

TENSORS = ("model.safetensors", "optimizer.safetensors")
OWN = {"run", "row", "accumulate", "world_size", "peak_memory_bytes"}  # not of the result
RESULT = ("data", "exact", "seeds", "skipped", "validations", "weights_sha256")  # of run.json
CLOCKS = ("seconds", "per_second")


def differences(run: Path, expected: Path, published: Path, ranks: int) -> list[str]:
    """What differs between a finished run and the uninterrupted one, a line each."""
    found = [*_files(run, expected, [FINAL_WEIGHTS]), *_folders(run, expected, "hf")]
    last = steps_in(expected)[0][0]
    for home in [run, *(run / f"rank{rank}" for rank in range(1, ranks))]:
        steps = [step for step, _ in steps_in(home)]
        if steps[:1] != [last]:
            found.append(f"{home.name} ends with the checkpoints {steps}, not with {last}")
        for step in steps:
            if (expected / f"step{step}").exists():
                found += _files(home, expected, [f"step{step}/{name}" for name in TENSORS])
    for twin in run.glob("hf_step*"):
        if (expected / twin.name).exists():
            found += _folders(run, expected, twin.name)
    found += _metrics(timeless(run), timeless(expected))
    found += _values("summary.json", summary(run), summary(expected))
    found += _values("run.json", record(run), record(expected))
    left = [path.name for path in run.rglob(".*") if path.name != ".lock"]
    found += [f"killed attempts left {left} behind"] if left else []
    return found + _files(published, run, PUBLISHED)


def attempts_differ(run: Path, from_steps: list[int]) -> list[str]:
    """Whether run.json holds other attempts than those that the final weights come from."""
    attempts = read_json(run / "run.json")["attempts"]
    found = [attempt["from_step"] for attempt in attempts]
    if found != from_steps or attempts[-1]["end"] != "complete":
        return [f"run.json: attempts from steps {found}, not {from_steps}"]
    return []


def summary(run: Path) -> dict:
    """summary.json without clocks and names."""
    values = read_json(run / "summary.json")
    return {k: v for k, v in values.items() if not k.endswith(CLOCKS) and k not in OWN}


def record(run: Path) -> dict:
    """What run.json says of the result."""
    values = read_json(run / "run.json")
    return {name: values[name] for name in RESULT}


def _files(run: Path, expected: Path, names) -> list[str]:
    return [
        f"{(run / name).relative_to(run.parent)} differs"
        for name in names
        if not (run / name).exists() or (run / name).read_bytes() != (expected / name).read_bytes()
    ]


def _folders(run: Path, expected: Path, name: str) -> list[str]:
    held = [sorted(file.name for file in (home / name).glob("*")) for home in (run, expected)]
    if held[0] != held[1]:
        return [f"{name} holds {held[0]}, not {held[1]}"]
    return _files(run, expected, [f"{name}/{file}" for file in held[0]])


def _metrics(found: list[dict], expected: list[dict]) -> list[str]:
    places = [[(line["kind"], line["step"]) for line in lines] for lines in (found, expected)]
    for number, (place, other) in enumerate(zip_longest(*places), 1):
        if place != other:
            return [f"metrics.jsonl, line {number}: {place}, not {other}"]
    return [
        difference
        for line, other in zip(found, expected, strict=True)
        for difference in _values(f"metrics.jsonl, {line['kind']} {line['step']}", line, other)
    ]


def _values(place: str, found: dict, expected: dict) -> list[str]:
    return [
        f"{place}: {name} is {found.get(name)!r}, not {expected.get(name)!r}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]

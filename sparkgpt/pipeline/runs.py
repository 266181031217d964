"""A run's run.json against its schema, its summary, its weights, and the values of its job."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json
from sparkgpt.pipeline.ledger import Ledger
from sparkgpt.pipeline.profiles import check_schema, parse_flags, split_ranks
from sparkgpt.pipeline.values import NO_IMAGE

WEIGHTS = "model_final.safetensors"


def run_failures(
    folder: Path, values: Mapping[str, str], job: str, ledger: Ledger, digest: Callable[[str], str]
) -> Iterator[str]:
    """One line per difference; `values` are those in the record of the train job of that name.

    The weights are looked at where they lie in the run's folder.
    """
    path, weights = folder / "run.json", folder / WEIGHTS
    try:
        record, summary = read_json(path), read_json(folder / "summary.json")
        check_schema(record, "run", str(path))
    except UserError as error:
        yield str(error)
        return
    if weights.is_file() and (found := digest(str(weights))) != record["weights_sha256"]:
        yield f"{weights}: sha256 is {found}, {path} says {record['weights_sha256']}"
    data, code = record["data"], record["code"]["train"]
    image = ledger.resolved(job, "image", record["image"] or NO_IMAGE)
    told = {
        "image": (image, values.get("image", NO_IMAGE)),
        "weights_sha256": (record["weights_sha256"], summary.get("weights_sha256")),
        "code": (ledger.resolved(job, "code", code), values.get("code")),
        "data": (
            f"train={data['train']['digest']} val={data['val']['digest']}" if data["val"] else "",
            values.get("data"),
        ),
    }
    for name, (found, expected) in told.items():
        if found != expected:
            yield f"{path}: {name} is {found}, recorded is {expected}"
    # A run may have been made under the flags in its job's record, or under any accepted as them.
    ranks, config = split_ranks(values.get("config", ""))
    if summary.get("world_size", 1) != ranks:
        yield f"{path}: world_size is {summary.get('world_size')}, recorded is {ranks}"
    texts = [
        split_ranks(text)[1] for text in ledger.equals(job, "config", values.get("config", ""))
    ]
    if all(flags_of(record["arguments"], text) != parse_flags(text) for text in texts):
        found, expected = flags_of(record["arguments"], config), parse_flags(config)
        wrong = {name for name in expected if found[name] != expected[name]}
        words = ", ".join(f"--{n} {found[n]}, recorded is {expected[n]}" for n in sorted(wrong))
        yield f"{path}: flags differ: {words}"


def flags_of(arguments: Mapping[str, object], config: str) -> dict[str, object]:
    """The values in run.json of the flags that a job's text names, as that text writes them."""
    found = {}
    for name, text in parse_flags(config).items():
        value = arguments.get(name.removeprefix("no-").replace("-", "_"))
        if isinstance(value, bool):
            found[name] = value != name.startswith("no-")
        else:
            found[name] = text if _equal(value, text) else value
    return found


def _equal(value: object, text: object) -> bool:
    if isinstance(value, int | float):
        return float(value) == _number(str(text))
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) == text
    return value == text


def _number(text: str) -> float:
    """NaN, which equals nothing, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan

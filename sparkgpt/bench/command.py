"""`sparkgpt bench`: one run, one table of figures beside their aims, one record.

Imports torch once the flags are known to be right.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import tempfile
from pathlib import Path

from sparkgpt.bench.shapes import DEFAULT, Settings, chunk_of
from sparkgpt.config import MOST_THREADS, ModelConfig, flag_name
from sparkgpt.errors import UserError
from sparkgpt.files import make_directory, read_json, write_json
from sparkgpt.flags import Parser

SCHEMA = 1
SECTIONS = ("step", "data", "startup")
MOST_GB = 1000.0


def main(argv: list[str]) -> int:
    """Measure, print, record. Returns 1, and prints no speed, when the results disagree with
    transformers'; an aim that is not met is no failure."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.show:
        return show(args.show)
    sections, sizes = _sections(args.only), _sizes(args.sizes)
    if args.documents < 1:
        parser.error(f"--documents {args.documents}: must be at least 1")
    settings = _settings(args)
    _check(settings, sections)
    if args.out:
        make_directory(Path(args.out).parent)  # now, not after minutes of measuring

    from sparkgpt.train.__main__ import prepare_environment

    prepare_environment(settings.train)  # a step is timed as `train` would run it
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells when it starts and stops
    record = measure(settings, sections, sizes, args.documents)
    agreed = record.get("agreed", True)
    if args.json:
        print(json.dumps(record))
    if not agreed:
        raise UserError(
            f"loss or gradients differ from transformers' ({_worst(record)}), so no speed is told; "
            "mend the model first",
            exit_code=1,
        )
    if not args.json:
        from sparkgpt.bench.aims import table

        print(table(record, sections))
    if args.out:
        write_json(args.out, record)
    return 0


def show(path: str) -> int:
    """Print the table of a record. UserError when it is none, or one of results that disagreed."""
    from sparkgpt.bench.aims import table

    record = read_json(path)
    if record.get("schema") != SCHEMA or not record.get("agreed", True):
        raise UserError(f"{path} is no record of `sparkgpt bench` with figures; make one by --out")
    print(table(record, [section for section in SECTIONS if section in record]))
    return 0


def measure(settings: Settings, sections: list[str], sizes: list[float], documents: int) -> dict:
    """The record: settings, machine, load before and after, each section, all figures on top.

    When the step's agreement is red, it ends there, with `agreed` false and no figure at all.
    """
    from sparkgpt.bench.aims import AIMS

    if settings.threads:
        import torch

        torch.set_num_threads(settings.threads)
    record = {"schema": SCHEMA, "settings": dataclasses.asdict(settings), "machine": _machine()}
    record["load_before"] = os.getloadavg()  # of 1, 5 and 15 minutes
    with tempfile.TemporaryDirectory(prefix="sparkgpt-bench-") as name:
        for section in sections:
            record[section] = _run(section, settings, sizes, documents, Path(name))
            if section == "step":
                checks = record[section]["agreement"].values()
                record["agreed"] = all(check["passed"] for check in checks)
                if not record["agreed"]:
                    return record
    record["load_after"] = os.getloadavg()
    found = {}
    for section in sections:
        found |= record[section].pop("figures")
    return record | {aim.figure: found.get(aim.figure) for aim in AIMS if aim.section in sections}


def _machine() -> dict:
    """Processor, cores, threads, system; versions of libraries; the tree that was measured."""
    from sparkgpt.provenance import platform_state, tree_state, versions

    libraries = versions()
    try:
        libraries["transformers"] = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        pass
    tree = tree_state()
    kept = {name: tree[name] for name in ("commit", "hash", "dirty")}
    return {"platform": platform_state(), "versions": libraries, "tree": kept}


def _run(
    section: str, settings: Settings, sizes: list[float], documents: int, folder: Path
) -> dict:
    if section == "step":
        from sparkgpt.bench.step import run_step

        return run_step(settings, folder)
    if section == "data":
        from sparkgpt.bench.datapath import run_data

        return run_data(sizes, documents, settings.seed, folder)
    from sparkgpt.bench.startup import run_startup

    return run_startup(settings, folder)


def _parser() -> Parser:
    parser = Parser(
        prog="sparkgpt bench",
        description="How fast a CPU training step is, against the bare kernels and transformers, "
        "where its time goes, and what data and starts cost. Alone on the machine, please.",
    )
    fields = {item.name: item for item in dataclasses.fields(ModelConfig)}
    for name, value in DEFAULT.items():
        text = fields[name].metadata["help"]
        parser.add_argument(flag_name(name), type=int, default=value, metavar="INT", help=text)
    item = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, text in (
        ("window", "positions in a window"),
        ("longest", "bytes of the longest document"),
        ("rounds", "rounds, each of one step of every contestant"),
        ("warm_steps", "steps before the rounds, at least"),
        ("profiled", "steps under the profiler, for the split"),
        ("threads", "CPU threads (0: torch's choice)"),
        ("seed", "seed of weights, documents and their order"),
    ):
        parser.add_argument(flag_name(name), type=int, default=item[name], metavar="INT", help=text)
    parser.add_argument("--data", default="", metavar="CACHE", help="documents of the step; "
                        "default: synthetic ones, as long as news articles")  # fmt: skip
    parser.add_argument("--moe", action="store_true", help="an 8x2 MoE of equal width beside it")
    parser.add_argument("--sizes", default="0.1,1", metavar="LIST", help="GB of text, for data")
    parser.add_argument("--documents", type=int, default=10_000_000, metavar="INT",
                        help="documents at which opening and resuming are measured")  # fmt: skip
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="LIST", help="sections")
    parser.add_argument("--out", default="", metavar="FILE", help="write the record there")
    parser.add_argument(
        "--show", default="", metavar="FILE", help="print the table of a record, and no more"
    )
    parser.add_argument("--json", action="store_true", help="print the record as one JSON object")
    return parser


def _settings(args) -> Settings:
    names = {item.name for item in dataclasses.fields(Settings)} - {"shape"}
    values = {name: getattr(args, name) for name in names}
    return Settings(shape={name: getattr(args, name) for name in DEFAULT}, **values)


def _check(settings: Settings, sections: list[str]) -> None:
    """UserError for a shape, window or count that can't be measured."""
    for name, least in (("window", 2), ("longest", 1), ("rounds", 1), ("warm_steps", 2),
                        ("profiled", 1), ("threads", 0)):  # fmt: skip
        if getattr(settings, name) < least:
            raise UserError(
                f"{flag_name(name)} {getattr(settings, name)}: must be at least {least}"
            )
    if settings.threads > MOST_THREADS:
        raise UserError(f"--threads {settings.threads}: must be at most {MOST_THREADS}")
    if settings.longest >= settings.window:
        raise UserError(
            f"--longest {settings.longest} does not fit a window of {settings.window}; "
            f"choose at most {settings.window - 1}"
        )
    settings.models()  # refuses what can't be built
    if "step" in sections:
        chunk_of(settings.window)


def _sections(text: str) -> list[str]:
    """Sections named in --only, in the order in which they run. UserError for an unknown one."""
    wanted = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := sorted(wanted - set(SECTIONS)):
        raise UserError(
            f"--only {text}: no section {unknown[0]!r}; choose of {', '.join(SECTIONS)}"
        )
    if not wanted:
        raise UserError(f"--only {text!r} names no section; choose of {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in wanted]


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--sizes {text}: give GB as numbers, like 0.1,1") from None
    if not all(0 < size <= MOST_GB for size in sizes):
        raise UserError(f"--sizes {text}: each must lie above 0 and at most at {MOST_GB:g}")
    return sizes


def _worst(record: dict) -> str:
    """Model, quantity, difference and tolerance of the check that is furthest out."""
    found = []
    for model, check in record["step"]["agreement"].items():
        for name, limit in check["tolerances"].items():
            difference = check["differences"][name]
            difference = math.inf if difference is None else difference
            told = f"{model}: {name} by {difference:.1e}, tolerance {limit:.0e}"
            found.append((difference / limit, told))
    return max(found)[1]

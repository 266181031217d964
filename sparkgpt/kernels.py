"""The command that compiles every kernel configuration ahead of time, without a GPU.

It says what each takes of the device: a configuration that spills registers or wants more shared
memory than there is must not be shipped. That the kernels compute what they should is shown by
`tests/kernels`, in Triton's interpreter.
"""

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from sparkgpt.doctor.host import cores_allowed
from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.ops.kernels.specimen import FAMILIES
from sparkgpt.progress import progress

ARCHS = (90, 100, 120, 121)
COLUMNS = (
    "family", "kernel", "label", "tiles", "arch", "num_warps", "num_stages", "shared_bytes",
    "registers", "stack_bytes", "local_bytes",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Print the table of all configurations. Returns 1 when one of them must not be shipped."""
    parser = Parser(
        prog="sparkgpt kernels",
        description="Compile every configuration of the Triton kernels, without a GPU: registers, "
        "spills, shared memory. Needs triton.",
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=ARCHS, default=[121], help="compute capabilities"
    )
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="these kernels (all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    rows = compile_all(args.family, args.arch)
    bad = [row for row in rows if not row["ok"]]
    if args.json:
        version = importlib.metadata.version("triton")
        print(json.dumps({"ok": not bad, "triton": version, "kernels": rows}))
    else:
        print(table(rows))
    for row in bad:
        where = f"{row['family']} {row['kernel']} {row['label']} {tiles_of(row)}"
        problems = "; ".join(row["problems"])
        print(f"sparkgpt: error: {where} on sm_{row['arch']}: {problems}", file=sys.stderr)
    return 1 if bad else 0


def compile_all(families: Sequence[str], archs: Sequence[int]) -> list[dict[str, object]]:
    """A row per family, specimen and architecture, in that order, as `compiled` makes them.

    UserError without triton. Compiles in fresh processes, one a core, that never see
    TRITON_INTERPRET: it would turn kernels into plain Python.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("`sparkgpt kernels` needs triton; on Linux: pip install triton")
    spawn = multiprocessing.get_context("spawn")
    try:
        with _no_interpreter(), ProcessPoolExecutor(cores_allowed(), mp_context=spawn) as pool:
            counts = pool.map(_count, families)
            jobs = [
                (family, index, arch)
                for family, count in zip(families, counts, strict=True)
                for index in range(count)
                for arch in archs
            ]
            futures = [pool.submit(_compile, *job) for job in jobs]
            with progress("compiling", len(jobs)) as bar:
                for future in as_completed(futures):
                    bar.advance(1, future.result()["kernel"])
            return [future.result() for future in futures]
    except BrokenProcessPool:
        raise UserError(
            "a compiling process died; name one --family at a time to see which", exit_code=1
        ) from None


def table(rows: list[dict[str, object]]) -> str:
    """The rows as aligned text, numbers to the right."""
    heads = [name.removesuffix("_bytes").removeprefix("num_") for name in COLUMNS]
    cells = [[_cell(row, name) for name in COLUMNS] + [_verdict(row)] for row in rows]
    lines = [[*heads, ""], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = COLUMNS.index("arch")
    aligned = [
        "  ".join(
            cell.ljust(width) if place < numbers or place == len(COLUMNS) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(aligned)


def tiles_of(row: dict[str, object]) -> str:
    """`R128 N128 K64`: the tile sizes without the word BLOCK."""
    return " ".join(f"{k.removeprefix('BLOCK_')}{v}" for k, v in row["tiles"].items())


def _cell(row: dict[str, object], name: str) -> str:
    if name == "tiles":
        return tiles_of(row)
    value = row.get(name, "-")
    return f"{value:,}" if name == "shared_bytes" and value != "-" else str(value)


def _verdict(row: dict[str, object]) -> str:
    return "ok" if row["ok"] else "NO: " + "; ".join(row["problems"])


@contextmanager
def _no_interpreter() -> Iterator[None]:
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _count(family: str) -> int:
    from sparkgpt.ops.kernels.compiled import family_module

    return len(family_module(family).specimens())


def _compile(family: str, index: int, arch: int) -> dict[str, object]:
    from sparkgpt.ops.kernels.compiled import compiled

    return compiled(family, index, arch)

"""`tests/gpu/run`: correctness and speed of the kernels on a CUDA device, and of training."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gpu import table
from gpu.cases import (
    CASES,
    DOCUMENT,
    POSITIONS,
    SHAPES,
    TRAIN,
    Case,
    case_bytes,
    case_flops,
)

SECONDS = 465  # of the 8 minutes, what is left beside starting
# Section -> its share of the time that is left when it begins, where others follow.
SECTIONS = {"tests": 0.28, "kernels": 0.42, "training": 1.0}
CHECKED = 2 * DOCUMENT  # positions at which errors are compared with fp64
STEPS = 30
FLAGS = {
    "fused-swiglu": "swiglu",
    "fused-qk-rope": "qk_rope",
    "triton-attention": "attention",
    "fused-dispatch": "dispatch",
    "chunked-head": "head",
    "triton-muon": "muon",
}


def main(argv: list[str]) -> int:
    """Run the sections; 0 when all of what ran passed and all of it ran."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of them")
    parser.add_argument("--list", action="store_true", help="say what would be done, and end")
    args = parser.parse_args(argv)
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    wanted = [name for name in SECTIONS if name in (args.sections or SECTIONS)]
    if args.list:
        print("\n".join(listing(wanted)))
        return 0
    try:
        import torch
    except ImportError:
        return refuse("torch is not installed; make env TORCH=cu130")
    if not torch.cuda.is_available():
        return refuse("there is no CUDA device here; --list says what would run on one")
    return prove(wanted, time.monotonic() + args.seconds)


def refuse(reason: str) -> int:
    print(f"sparkgpt: error: tests/gpu/run: {reason}", file=sys.stderr)
    return 2


def listing(wanted: list[str]) -> list[str]:
    """One line for everything that would be done."""
    lines = ["measure: a large copy and a large product in bfloat16"]
    if "tests" in wanted:
        lines.append("tests: tests/kernels with SPARKGPT_TEST_DEVICE=cuda")
    if "kernels" in wanted:
        lines += [f"kernels: {case.name}, beside plain and library" for case in CASES]
    if "training" in wanted:
        lines += [f"training: {name}, {STEPS} steps" for name, _, _ in runs()]
    return lines


def runs() -> list[tuple[str, str, dict[str, bool]]]:
    """(name, shape, flags on or off), the most telling first: all off and all on, then all but one,
    then all with inductor's own tuning of products."""
    everything = dict.fromkeys(FLAGS, True)
    found = []
    for shape in SHAPES:
        found.append((f"{shape}: none", shape, dict.fromkeys(FLAGS, False)))
        found.append((f"{shape}: all", shape, everything))
    for shape, model in SHAPES.items():
        kept = [f for f in FLAGS if model.num_experts or f != "fused-dispatch"]
        found += [(f"{shape}: all but {f}", shape, everything | {f: False}) for f in kept]
        found.append((f"{shape}: all, autotune-gemm", shape, everything | {"autotune-gemm": True}))
    return found


def prove(wanted: list[str], end: float) -> int:
    """Measure the device, run the sections, print and write what came out after each."""
    import torch

    from sparkgpt.doctor.ceiling import SPECIFICATIONS
    from sparkgpt.doctor.device import measure_rates
    from sparkgpt.provenance import device_state, versions

    out = Path(os.environ.get("OUT", "results/gpu-proof"))
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", 0)
    found = measure_rates(device, torch.cuda.mem_get_info(device)[0])
    state = device_state(device)
    spec = SPECIFICATIONS.get(state["name"])
    result = {
        "device": state,
        "versions": versions(),
        "rates": {"gemm": found.gemm, "copy": found.copy, "what": found.what},
        "specification": {"gemm": spec.gemm, "copy": spec.copy} if spec else None,
        "sections": {},
    }
    known = f"{spec.gemm / 1e12:.0f} and {spec.copy / 1e9:,.0f}" if spec else "nothing"
    print(
        f"{state['name']}: {found.gemm / 1e12:.0f} TFLOP/s and {found.copy / 1e9:,.0f} GB/s "
        f"measured, {known} specified"
    )
    sections = {"tests": suite_section, "kernels": kernel_section, "training": training_section}
    for index, name in enumerate(wanted):
        left = end - time.monotonic()
        share = SECTIONS[name] if index + 1 < len(wanted) else 1.0
        print(f"\n{name}, at most {max(0, left * share):.0f} s", flush=True)
        rows = sections[name](result, out, time.monotonic() + left * share)
        result["sections"][name] = rows
        (out / "proof.json").write_text(json.dumps(result, indent=1) + "\n")
    failed = [row for rows in result["sections"].values() for row in rows if not row["passed"]]
    print(f"\n{len(failed)} failed or not run" if failed else "\nall ran and passed")
    return 1 if failed else 0


def suite_section(result: dict, out: Path, end: float) -> list[dict]:
    """tests/kernels on the device, in a process of their own."""
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/kernels",
        f"--junitxml={report}",
    ]
    environment = os.environ | {"SPARKGPT_TEST_DEVICE": "cuda"}
    code, tail = _run([sys.executable, *words], environment, end, out / "tests.log")
    row = {"case": "tests/kernels", "note": tail, "passed": code == 0}
    if code is None:
        row["note"] = f"{table.NOT_RUN}; last line: {tail}"
    print(f"tests/kernels: {row['note']}")
    return [row]


def kernel_section(result: dict, out: Path, end: float) -> list[dict]:
    """Each case in bfloat16: errors against fp64, then its time beside plain, library and floor.
    Float32 is compared by the tests."""
    import torch

    device, rates, rows = torch.device("cuda", 0), result["rates"], []
    plain: dict[Case, float] = {}
    bare: dict[tuple[str, str], float | None] = {}
    for case in CASES:
        if time.monotonic() > end:
            rows.append(table.failed_row("case", case.name, table.NOT_RUN))
            continue
        try:
            rows.append(_measure(case, device, rates, plain, bare))
        except Exception as error:  # one kernel that fails must not hide the others
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            rows.append(table.failed_row("case", case.name, f"failed: {reason}"))
        finally:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    print(table.render(table.KERNELS, rows))
    return rows


def _measure(case: Case, device, rates: dict, plain: dict, bare: dict) -> dict:
    import statistics

    import torch
    from gpu.modules import build, library

    from sparkgpt.ops.tuning import milliseconds

    timed = lambda action: statistics.median(milliseconds(action, device))
    half, cpu = torch.bfloat16, torch.device("cpu")  # where grouped_mm has no float64
    compared = [(case, device, half), (case.plain, device, half), (case.plain, cpu, torch.float64)]
    ratio = table.error_ratio(*(build(*one, CHECKED)() for one in compared))
    if case.plain not in plain:
        plain[case.plain] = timed(build(case.plain, device, torch.bfloat16))
    if (case.part, case.shape) not in bare:
        action = library(case, device)
        bare[case.part, case.shape] = timed(action) if action else None
    ms = timed(build(case, device, torch.bfloat16))
    floor = table.floor_ms(case_bytes(case), case_flops(case), rates["copy"], rates["gemm"])
    return table.kernel_row(
        case.name, ratio, ms, plain[case.plain], bare[case.part, case.shape], floor
    )


def training_section(result: dict, out: Path, end: float) -> list[dict]:
    """STEPS steps of each shape on synthetic documents, flags off and on."""
    from sparkgpt.doctor.savings import operations
    from sparkgpt.files import read_json
    from sparkgpt.model.bytes import step_bytes

    documents = write_documents(out / "documents.jsonl")
    spec, rows = result["specification"], []
    for name, shape, flags in runs():
        if time.monotonic() > end - 20:
            rows.append(table.failed_row("run", name, table.NOT_RUN))
            continue
        folder = f"run{len(rows)}"
        words = [
            sys.executable,
            "-m",
            "sparkgpt",
            *train_words(shape, flags, documents, out, folder),
        ]
        code, tail = _run(words, os.environ, end, out / f"{folder}.log")
        if code != 0:
            reason = table.NOT_RUN if code is None else f"failed: {tail[:160]}"
            rows.append(table.failed_row("run", name, reason))
            continue
        model = SHAPES[shape]
        fused = frozenset(fusion for flag, fusion in FLAGS.items() if flags[flag])
        traffic = sum(step_bytes(model, TRAIN, 2, fused).values())
        summary = read_json(out / "runs" / folder / "summary.json")
        rows.append(
            table.training_row(
                name, summary, traffic, operations(model), result["rates"], spec and spec["gemm"]
            )
        )
        print(table.render(table.TRAINING, rows[-1:]), flush=True)
    print(table.render(table.TRAINING, rows))
    return rows


def train_words(
    shape: str, flags: dict[str, bool], documents: Path, out: Path, folder: str
) -> list[str]:
    """The command line of one run."""
    model = SHAPES[shape]
    named = {
        "train-path": documents, "out-dir": out / "runs", "run-name": folder, "device": "cuda",
        "tokens-per-batch": POSITIONS, "target-tokens": (STEPS + 1) * POSITIONS,
        "max-train-steps": STEPS, "log-every": 5, "model-layers": model.model_layers,
        "model-dim": model.model_dim, "attention-heads": model.attention_heads,
        "kv-heads": model.kv_heads, "intermediate-size": model.intermediate_size,
        "num-experts": model.num_experts,
    }  # fmt: skip
    words = [
        "train",
        *(text for name, value in named.items() for text in (f"--{name}", str(value))),
    ]
    switches = {"autotune-gemm": False} | flags
    return words + [f"--{'' if on else 'no-'}{name}" for name, on in switches.items()]


def write_documents(path: Path) -> Path:
    """Synthetic documents that fill windows to the last position."""
    import numpy as np

    from sparkgpt.bench.documents import write_jsonl

    count = (STEPS + 2) * POSITIONS // DOCUMENT
    write_jsonl(path, np.full(count, DOCUMENT - 1), seed=0)
    return path


def _run(words: list[str], environment: dict, end: float, log: Path) -> tuple[int | None, str]:
    """(exit code, last line) of a program; None when its time ran out."""
    with open(log, "w", encoding="utf-8") as file:
        try:
            seconds = max(1.0, end - time.monotonic())
            code = subprocess.run(
                words, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return code, lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

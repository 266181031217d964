"""What the proof makes of its timings: pure arithmetic and text, tested on a CPU."""

from collections.abc import Iterable, Mapping
from typing import Any

from sparkgpt.doctor.ceiling import mfu

NOT_RUN = "not run: out of time"
KERNELS = ("case", "errors", "ms", "plain ms", "gain", "library ms", "floor ms", "of floor")
TRAINING = ("run", "tok/s", "ms", "floor ms", "of floor", "peak GiB", "MFU spec", "MFU measured")


def error_ratio(ours: Iterable[Any], same: Iterable[Any], exact: Iterable[Any]) -> float:
    """The largest, over outputs and gradients, of our error over that of the same precision, both
    against fp64; infinite when something of ours is not finite. At most 2 is a pass.

    One rounding of the largest value is allowed where the other happens to be exact.
    """
    import torch

    ratios = []
    for one, other, wide in zip(ours, same, exact, strict=True):
        wide = wide.to(one.device).double()
        unit = torch.finfo(other.dtype).eps * wide.abs().max().item()
        allowed = max((other.double() - wide).abs().max().item(), unit / 2)
        error = (one.double() - wide).abs().max().item()
        finite = bool(one.isfinite().all())
        ratios.append((error / allowed if allowed else 0.0) if finite else float("inf"))
    return max(ratios)


def floor_ms(traffic: float, flops: float, copy: float, gemm: float) -> float:
    """The larger of bytes over bytes/s and FLOPs over FLOP/s, in milliseconds."""
    return 1e3 * max(traffic / copy, flops / gemm)


def kernel_row(
    name: str,
    ratio: float | str,
    ms: float | None,
    plain_ms: float | None,
    library_ms: float | None,
    floor: float,
) -> dict[str, Any]:
    """One case; `ratio` from `error_ratio`, or why there is none."""
    return {
        "case": name,
        "errors": ratio if isinstance(ratio, str) else f"{ratio:.2f} of 2",
        "ms": ms,
        "plain ms": plain_ms,
        "gain": plain_ms / ms if ms and plain_ms else None,
        "library ms": library_ms,
        "floor ms": floor,
        "of floor": floor / ms if ms else None,
        "passed": not isinstance(ratio, str) and ratio <= 2,
    }


def training_row(
    name: str,
    summary: Mapping[str, Any],
    traffic: float,
    flops: float,
    rates: Mapping[str, float],
    spec_gemm: float | None,
) -> dict[str, Any]:
    """One run, from its summary.json. `traffic` and `flops` of a step give the floor; MFU is the
    model's own FLOPs (the summary's) against the specification and the measured product."""
    speed = summary["window_tokens_per_second"]
    ms = 1e3 * summary["tokens_per_batch"] * summary["accumulate"] / speed
    floor = floor_ms(traffic, flops, rates["copy"], rates["gemm"])
    model_rate = summary["tflops_per_second"] * 1e12
    return {
        "run": name,
        "tok/s": speed,
        "ms": ms,
        "floor ms": floor,
        "of floor": floor / ms,
        "peak GiB": summary["peak_memory_bytes"] / 2**30,
        "MFU spec": mfu(model_rate, 1.0, spec_gemm) if spec_gemm else None,
        "MFU measured": mfu(model_rate, 1.0, rates["gemm"]),
        "passed": True,
    }


def failed_row(column: str, name: str, reason: str) -> dict[str, Any]:
    """A case or run without figures, and why."""
    return {column: name, "note": reason, "passed": False}


def render(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    """A table in plain text; a row without figures ends in its reason."""
    lines = [list(columns)]
    for row in rows:
        if "note" in row:
            lines.append([row[columns[0]], row["note"]])
        else:
            lines.append([_cell(name, row.get(name)) for name in columns])
    full = [line for line in lines if len(line) == len(columns)]
    widths = [max(len(line[i]) for line in full) for i in range(len(columns))]
    widths[0] = max(len(line[0]) for line in lines)
    shown = []
    for line in lines:
        cells = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=False)]
        rest = cells if len(line) == len(columns) else line[1:]
        shown.append("  ".join([line[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(shown)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name.startswith(("MFU", "of ")):
        return f"{value:.1%}"
    if name == "tok/s":
        return f"{value:,.0f}"
    return f"{value:,.2f}"

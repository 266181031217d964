"""The section `startup`: how long commands take to answer, and a run to its first step."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sparkgpt.bench.child import last_line, run_here
from sparkgpt.bench.documents import news_lengths, write_synthetic_cache
from sparkgpt.bench.memory import train_flags
from sparkgpt.bench.shapes import Settings
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT
from sparkgpt.progress import progress

REPEATS = 5
POLL_SECONDS = 0.005
TIMEOUT_SECONDS = 600.0
SMALL_CACHE = 200  # documents

PYTHON = (sys.executable, "-m")
# Figure -> the command, started in the checkout.
COMMANDS = {
    "help_seconds": (*PYTHON, "sparkgpt", "--help"),
    "tables_check_seconds": (*PYTHON, "sparkgpt", "tables", "--check"),
    "snakemake_dry_run_seconds": (*PYTHON, "snakemake", "-n", "--config", "profile=cpu"),
}


def run_startup(settings: Settings, folder: Path) -> dict:
    """Median seconds of each command, and of the first logged step of a run on a small cache.

    A command that fails has no figure: `failed` says why.
    """
    samples: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with progress("starts of commands", len(COMMANDS) + 1) as bar:
        for name, command in COMMANDS.items():
            try:
                samples[name] = [command_seconds(name, command) for _ in range(REPEATS)]
            except UserError as error:
                failed[name] = str(error)
            bar.advance(1, name)
        samples["first_step_seconds"] = [first_step(settings, folder)]
        bar.advance(1, "first_step_seconds")
    figures = {name: statistics.median(values) for name, values in samples.items()}
    return {"samples": samples, "failed": failed, "figures": figures}


def command_seconds(name: str, command: tuple[str, ...]) -> float:
    """Wall seconds from the process' start to its end. UserError when it fails."""
    start = time.perf_counter()
    run_here(command, name, TIMEOUT_SECONDS)
    return time.perf_counter() - start


def first_step(settings: Settings, folder: Path) -> float:
    """Seconds from the start of `sparkgpt train` to its first line in metrics.jsonl.

    On a cache of SMALL_CACHE synthetic documents. UserError when the run ends without one.
    """
    lengths = news_lengths(SMALL_CACHE, settings.longest, settings.seed)
    data = write_synthetic_cache(folder / "startup.cache", lengths, settings.seed).path
    flags = train_flags(settings, data, folder, "first-step", 1)
    metrics = folder / "first-step" / "metrics.jsonl"
    with open(folder / "first-step.log", "w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*PYTHON, "sparkgpt", "train", *flags], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            while not _has_step(metrics):
                if process.poll() is not None or time.perf_counter() - start > TIMEOUT_SECONDS:
                    log.seek(0)
                    raise UserError(f"the run logged no step: {last_line(log.read())}", exit_code=1)
                time.sleep(POLL_SECONDS)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()


def _has_step(metrics: Path) -> bool:
    """Whether a whole line of a training step is in the file."""
    try:
        lines = metrics.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return False
    return any(json.loads(line)["kind"] == "train" for line in lines)

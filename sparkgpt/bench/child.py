"""Work measured in a process of its own: `python -m sparkgpt.bench.child TASK ARGUMENTS`.

Its peak memory is its own then, and its start is a start. ARGUMENTS is a JSON object; the result
is one, the last line on stdout.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sparkgpt.errors import UserError, explain
from sparkgpt.fingerprint import ROOT

BATCHES = 20  # windows materialised for one figure
TIMEOUT_SECONDS = 3600


def run_child(task: str, arguments: dict) -> dict:
    """Run a task in a new process, in this checkout, and return its result.

    UserError (exit code 1) when it fails.
    """
    command = [sys.executable, "-m", "sparkgpt.bench.child", task, json.dumps(arguments)]
    return json.loads(run_here(command, task).splitlines()[-1])


def run_here(command: Sequence[str], name: str, seconds: float = TIMEOUT_SECONDS) -> str:
    """Run a command in this checkout; what it printed. UserError (exit code 1) when it fails."""
    what = f"the benchmark's process {name!r}"
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{what} took more than {seconds:g} seconds; ask for less", exit_code=1
        ) from error
    if ended.returncode:
        reason = last_line(ended.stderr or ended.stdout)
        raise UserError(f"{what} ended with {ended.returncode}: {reason}", exit_code=1)
    return ended.stdout


def last_line(text: str) -> str:
    """Of what a program printed, in which the reason of its end stands."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def peak_rss() -> int:
    """Most resident bytes of this process so far. UserError where there is no /proc.

    Not getrusage's peak, which a new process inherits from the one that started it.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise UserError("peak memory is VmHWM of /proc/self/status, which this system lacks", 1)


def train(flags: list[str]) -> dict:
    """A training run: the peak of its resident bytes."""
    from sparkgpt.flags import parse_train
    from sparkgpt.train.__main__ import prepare_environment

    model, config = parse_train(flags)
    prepare_environment(config)
    from sparkgpt.train.run import run

    run(model, config, flags)
    return {"peak_rss_bytes": peak_rss()}


def cache(documents: str, out: str) -> dict:
    """A byte cache from JSONL: seconds by wall and by processor, on all processes, and peak."""
    from sparkgpt.data.cache import build_cache

    wall, cpu = time.perf_counter(), _cpu_seconds()
    build_cache(documents, out)
    return {
        "cache_seconds": time.perf_counter() - wall,
        "cache_cpu_seconds": _cpu_seconds() - cpu,
        "cache_peak_rss_bytes": peak_rss(),
    }


def plan(path: str, window: int, buffer: int) -> dict:
    """Planning an epoch of a cache's documents by itself: seconds, documents."""
    from sparkgpt.data.packing import plan_epoch
    from sparkgpt.data.store import ByteCache

    positions = ByteCache.open(path).lengths + 1
    start = time.perf_counter()
    plan_epoch(positions, window, buffer, 0)
    return {"plan_seconds": time.perf_counter() - start, "documents": len(positions)}


def stream(path: str, window: int, buffer: int, place: float, verify: bool, keep: str) -> dict:
    """A run's way to the batch at `place` (share of the first epoch) of a cache, with plans kept in
    the folder `keep` ("": nowhere).

    Seconds: `open`, `verify` (when asked), `rejoin` from the open cache to that batch, `batch` the
    median of later ones, `start` all up to the first; bytes: `stream_peak_rss`.
    """
    from sparkgpt.data.store import ByteCache
    from sparkgpt.data.stream import WindowStream

    began = time.perf_counter()
    documents = ByteCache.open(path)
    opened = time.perf_counter()
    if verify:
        documents.verify()
    verified = time.perf_counter()
    folder = Path(keep) if keep else None
    windows = WindowStream(documents, window=window, buffer=buffer, seed=0, keep=folder)
    last = windows.windows_for(len(documents) + int(documents.offsets[-1])) - 1
    index = int(place * last)
    windows.window(index)
    joined = time.perf_counter()
    batches = []
    for later in range(index, index + BATCHES):
        start = time.perf_counter()
        windows.window(min(later, last))
        batches.append(time.perf_counter() - start)
    return {
        "open_seconds": opened - began,
        "verify_seconds": verified - opened,
        "rejoin_seconds": joined - verified,
        "start_seconds": joined - began,
        "batch_seconds": sorted(batches)[BATCHES // 2],
        "stream_peak_rss_bytes": peak_rss(),
    }


TASKS = {"train": train, "cache": cache, "plan": plan, "stream": stream}


def _cpu_seconds() -> float:
    """Of this process and those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main(argv: list[str]) -> int:
    task, arguments = argv
    result = TASKS[task](**json.loads(arguments))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError, KeyboardInterrupt) as error:
        message, code = explain(error)
        print(message, file=sys.stderr)
        sys.exit(code)

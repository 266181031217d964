"""CUDA devices of one machine: each process takes one for itself and leaves the host its memory."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from sparkgpt.errors import UserError

# One fixed place, not tempfile's: TMPDIR differs between users and batch jobs, and a lock that not
# all find guards nothing. Any user may write to /tmp, and containers see the host's.
LOCKS = Path("/tmp/sparkgpt-devices")
UNIFIED_FLOOR = 8 * 2**30  # bytes; unified memory hangs the host when it runs out
POLL_SECONDS = 1.0


@contextmanager
def device_for(name: str) -> Iterator[torch.device]:
    """The CPU; or, for 'cuda', a device that no other process here computes on.

    It waits until one is free, and holds its lock while the context is open. A rank of several
    takes the device of its number; a process of its own takes any. UserError as in
    `keep_unified_floor`.
    """
    if name == "cpu":
        yield torch.device("cpu")
        return
    rank = os.environ.get("LOCAL_RANK")
    visible = range(torch.cuda.device_count()) if rank is None else [int(rank)]
    files = {index: _lock_file(torch.cuda.get_device_properties(index).uuid) for index in visible}
    try:
        device = torch.device("cuda", _wait_for_one(files))
        keep_unified_floor(device)
        yield device
    finally:
        for file in files.values():
            os.close(file)


def keep_unified_floor(device: torch.device) -> None:
    """On a device that shares the host's memory, leave UNIFIED_FLOOR bytes of it alone.

    What would go beyond raises then, instead of hanging the host. UserError (exit code 1) when less
    than the floor is free already.
    """
    properties = torch.cuda.get_device_properties(device)
    if not properties.is_integrated:
        return
    free = _available_memory()
    if free <= UNIFIED_FLOOR:
        raise UserError(
            f"{properties.name} shares the host's memory, of which {free / 2**30:.1f} GiB are "
            f"free; {UNIFIED_FLOOR / 2**30:.0f} GiB must stay free, or the host hangs; end other "
            "programs",
            exit_code=1,
        )
    share = min(1.0, (free - UNIFIED_FLOOR) / properties.total_memory)
    torch.cuda.set_per_process_memory_fraction(share, device)


def _available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that programs can still get; the page cache counts as free, unlike in MemFree."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"{meminfo} has no MemAvailable; Linux 3.14 or newer is needed", exit_code=1)


def _lock_file(uuid: object) -> int:
    """Open a device's lock file, which any user may hold."""
    path = LOCKS / f"{uuid}.lock"
    with suppress(FileExistsError):
        LOCKS.mkdir()
        LOCKS.chmod(0o1777)
    with suppress(FileExistsError):
        path.touch(exist_ok=False)
        path.chmod(0o644)
    return os.open(path, os.O_RDONLY)  # flock needs no more, and a sticky folder grants others none


def _wait_for_one(files: dict[int, int]) -> int:
    waiting = False
    while True:
        for index, file in files.items():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return index
            except BlockingIOError:
                continue
        if not waiting:
            print(f"waiting for a CUDA device: {len(files)} in use", file=sys.stderr, flush=True)
            waiting = True
        time.sleep(POLL_SECONDS)

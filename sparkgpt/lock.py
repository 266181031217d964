"""Locks that die with their owner, however the owner dies (flock(2))."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import make_directory

POLL_SECONDS = 1.0


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `folder`/.lock by flock(2) while the context is open; the folder is made if missing.

    When another process holds it: with `on_wait`, call that every second until it is free; without,
    UserError naming the holder's pid.
    """
    path = make_directory(folder) / ".lock"
    with open(path, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if on_wait is None:
                    raise UserError(
                        f"{folder} is being written by process {_holder(path)}; "
                        "wait for it or stop it, or choose another --run-name",
                        exit_code=1,
                    ) from None
                on_wait()
                time.sleep(POLL_SECONDS)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `.<name>.lock` beside an output, waiting for another holder to let go.

    The lock file stays: removing it could give two processes a lock each. Raises OSError when it
    can't be written.
    """
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    return path.read_text().strip() or "(unknown)"

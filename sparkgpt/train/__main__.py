"""Entry of `sparkgpt train` and of `python -m sparkgpt.train` (the form that torchrun starts).

Light until the flags are known to be right and the code to be what was scheduled.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkgpt.config import TrainConfig
from sparkgpt.errors import RankLost, UserError, explain
from sparkgpt.files import read_json, write_json
from sparkgpt.fingerprint import code_digest
from sparkgpt.flags import parse_train
from sparkgpt.image import check_image

M_ARENA_MAX = -8  # of malloc.h


def check_code(expected: str) -> None:
    """UserError when the training code isn't what the pipeline scheduled this run for."""
    found = code_digest("train")
    if expected and expected != found:
        raise UserError(
            f"the training code changed since this run was scheduled: expected {expected}, found "
            f"{found}; restore the tree, or start the pipeline again so that it schedules this "
            "code; `sparkgpt accept` comes first if the change alters no result"
        )


def prepare_environment(train: TrainConfig) -> None:
    """Settings that libraries read once, at their import."""
    # Growing segments in place keeps unified memory from fragmenting on GB10-class devices.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats only with one
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Threads that spin while they wait fall to a tenth of the speed beside another busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if train.threads:
        os.environ["OMP_NUM_THREADS"] = str(train.threads)
    if train.device != "cuda":
        share_heap()


def share_heap() -> None:
    """Let all threads allocate from one heap, so that memory which one has freed serves the others.

    glibc gives each thread one of its own, which keeps what the thread has freed. Before threads
    start; elsewhere than under glibc, nothing. Source: mallopt(3), M_ARENA_MAX.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_ARENA_MAX, 1)


@contextmanager
def stops_recorded(train: TrainConfig) -> Iterator[None]:
    """In the pipeline, leave `stopped.json` when a run is stopped by rule, for its own retries.

    Snakemake treats all failures alike and would train up to the same stop again. A new start of
    the pipeline is attempt 1, and tries anew.
    """
    record = Path(train.out_dir) / train.run_name / "stopped.json"
    if train.publish and record.exists():
        if train.attempt > 1:
            stop = read_json(record)
            raise UserError(f"not tried again: {stop['message']}", stop["exit_code"])
        record.unlink(missing_ok=True)  # another rank may be first
    try:
        yield
    except RankLost:
        raise
    except UserError as error:
        if train.publish and record.parent.exists():
            write_json(record, {"message": str(error), "exit_code": error.exit_code})
        raise


def main(argv: list[str]) -> int:
    """Parse, check, and run. Returns the exit code of `run`."""
    model, train = parse_train(argv)
    with stops_recorded(train):
        check_image()
        check_code(train.expect_code)
        prepare_environment(train)
        from sparkgpt.train.run import run

        return run(model, train, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError, KeyboardInterrupt) as error:
        message, code = explain(error)
        print(f"sparkgpt: error: {message}", file=sys.stderr)
        sys.exit(code)

"""Entry of `sparkgpt train` and of `python -m sparkgpt.train` (the form that torchrun starts).

Light until the flags are known to be right and the code to be what was scheduled.
"""

import os
import sys

from sparkgpt.config import TrainConfig, parse_train
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import code_digest


def check_code(expected: str) -> None:
    """UserError when the training code isn't what the pipeline scheduled this run for."""
    found = code_digest("train")
    if expected and expected != found:
        raise UserError(
            f"the training code changed since this run was scheduled: expected {expected}, found "
            f"{found}; restore the tree, or start the pipeline again so that it schedules this code"
        )


def prepare_environment(train: TrainConfig) -> None:
    """Settings that libraries read once, at their import."""
    # Growing segments in place keeps unified memory from fragmenting on GB10-class devices.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if train.threads:
        os.environ["OMP_NUM_THREADS"] = str(train.threads)


def main(argv: list[str]) -> int:
    model, train = parse_train(argv)
    check_code(train.expect_code)
    prepare_environment(train)
    from sparkgpt.train.run import run

    return run(model, train, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"sparkgpt: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

"""The one kind of error that a user can cause, and how any error becomes one line."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a used-up quota, a file too big


class UserError(Exception):
    """Something the user can put right: the message says what, where, and what to do.

    The command line prints it as one line, `sparkgpt: error: ...`, and exits with `exit_code`:
    2 for a wrong call or bad input, 1 for work that failed.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(UserError):
    """Another rank is gone. No fault of this run: a retry goes on from the last checkpoint."""


def explain(error: BaseException) -> tuple[str, int]:
    """One line and the exit code for a UserError, an OSError or a KeyboardInterrupt."""
    if isinstance(error, UserError):
        return " ".join(str(error).split("\n")), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    place = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error)
    advice = "free space or choose another place" if error.errno in FULL else "see --debug"
    return f"{place}{reason}; {advice}", 1

"""The one kind of error that a user can cause."""


class UserError(Exception):
    """Something the user can put right: the message says what, where, and what to do.

    The command line prints it as one line, `sparkgpt: error: ...`, and exits with `exit_code`:
    2 for a wrong call or bad input, 1 for work that failed.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code

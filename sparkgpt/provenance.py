"""Where a run came from: the tree, the code, the machine and the libraries, as JSON."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from sparkgpt.fingerprint import ENTRIES, code_digest

SCHEMA = 2
DIFF_CHARACTERS = 100_000  # of a changed tree, kept in each record; its digest is of all of it
# The list of packages that a container's image was built with; its digest names the image.
IMAGE_LIST = Path("/etc/sparkgpt-image")
LIBRARIES = ("torch", "numpy", "safetensors", "triton", "flash-attn", "snakemake")
ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str | None:
    """Output of a git command in the project's tree; None without git or outside a checkout."""
    try:
        result = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
            errors="replace",  # a diff may hold any bytes
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout


def tree_state() -> dict[str, object]:
    """The work tree itself: commit, sha256 over the files git tracks or would track, dirty flag,
    and what makes it dirty: `diff` (its beginning), `diff_sha256` and names of `untracked` files.

    All None, and no names, outside a checkout.
    """
    listing = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listing is None:
        nothing = dict.fromkeys(("commit", "hash", "dirty", "diff", "diff_sha256"))
        return nothing | {"untracked": []}
    digest = hashlib.sha256()
    for name in sorted(filter(None, listing.split("\0"))):
        path = ROOT / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {
        "commit": commit.strip() if commit else None,
        "hash": digest.hexdigest(),
        "dirty": bool(status and status.strip()),
        **_changes(),
    }


def _changes() -> dict[str, object]:
    diff = git("diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    untracked = git("ls-files", "-z", "--others", "--exclude-standard") or ""
    return {
        "diff": diff[:DIFF_CHARACTERS] or None,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "untracked": sorted(filter(None, untracked.split("\0"))),
    }


def image_digest() -> str | None:
    """Which container this runs in: $SPARKGPT_IMAGE_DIGEST, which an image sets for itself, or the
    digest of the package list inside it. None on the host."""
    if digest := os.environ.get("SPARKGPT_IMAGE_DIGEST"):
        return digest
    if IMAGE_LIST.is_file():
        return f"sha256:{hashlib.sha256(IMAGE_LIST.read_bytes()).hexdigest()}"
    return None


def versions() -> dict[str, str]:
    """Python's version and that of each installed library that a result can depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its local part: +cpu or +cu130
    return found


def platform_state() -> dict[str, object]:
    """System, machine, processor name, libc and torch's thread count."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "libc": " ".join(platform.libc_ver()),
        "threads": torch.get_num_threads(),
    }


def device_state(device: torch.device) -> dict[str, object]:
    """The device computed on: name, memory in bytes, compute capability, CUDA runtime."""
    if device.type != "cuda":
        return {"type": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def describe(device: torch.device) -> dict[str, object]:
    """The part of run.json that doesn't depend on the run: tree, code, lock, image, machine."""
    lock = ROOT / "requirements" / "base.lock.txt"
    return {
        "schema": SCHEMA,
        "tree": tree_state(),
        "code": {stage: code_digest(stage) for stage in ENTRIES},
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
        "image": image_digest(),
        "versions": versions(),
        "platform": platform_state(),
        "device": device_state(device),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

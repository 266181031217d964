"""The values that a job's result follows from, each one line of text."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json
from sparkgpt.fingerprint import ROOT, fingerprint, libraries_of

# Imported under another name than it is installed under.
DISTRIBUTIONS = {"mlx_lm": "mlx-lm", "flash_attn": "flash-attn"}
# Library -> packages that do its work, though none of our sources imports them.
BENEATH = {
    "transformers": ("tokenizers",),
    "mlx_lm": ("transformers", "tokenizers"),
    "mlx": ("mlx-cpu", "mlx-metal"),
}
NO_IMAGE = "none"
NOT_MADE = "not made yet"
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^\s\\]+(?: ; [^\\]*[^\\\s])?)", re.M)
RULE = re.compile(r"^(?:rule|checkpoint) (\w+):|^use rule (\w+) as (\w+) with:", re.M)
SHELL = re.compile(r"^    shell:\n((?:        .*\n?)+)", re.M)


class Unwatched:
    """A param that Snakemake formats into commands but doesn't compare: its value is beside it."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


@functools.cache
def pins(root: Path = ROOT) -> dict[str, str]:
    """Package -> its pinned version; several, each with its marker, when that depends on Python."""
    found: dict[str, str] = {}
    for name in ("base.lock.txt", "torch.txt"):
        for package, version in PIN.findall((root / "requirements" / name).read_text("utf-8")):
            found[package] = f"{found[package]}, {version}" if package in found else version
    return found


@functools.cache
def environment(stage: str, root: Path = ROOT) -> str:
    """The pins of the libraries that a stage's sources import, and of those that do their work."""
    imported = libraries_of(stage, root)
    names = {DISTRIBUTIONS.get(name, name) for name in imported}
    names.update(*(BENEATH.get(name, ()) for name in imported))
    pinned = pins(root)
    return ", ".join(f"{name}=={pinned[name]}" for name in sorted(names) if name in pinned)


@functools.cache
def shell_digests(root: Path = ROOT) -> dict[str, str]:
    """Rule -> digest of its shell text as it stands in workflow/rules, indentation aside."""
    found: dict[str, str] = {}
    for path in sorted((root / "workflow" / "rules").glob("*.smk")):
        parts = RULE.split(path.read_text(encoding="utf-8"))[1:]
        for rule, origin, copy, body in zip(*(parts[i::4] for i in range(4)), strict=True):
            shell = SHELL.search(body)
            if shell:
                lines = [line.strip() for line in shell[1].splitlines()]
                found[rule or copy] = fingerprint({"shell": lines})[:16]
            else:
                found[rule or copy] = found[origin]
    return found


def data_digests(folder: str) -> str:
    """`train=<content digest> val=<content digest>` of a profile's byte caches, if made."""
    found = []
    for split in ("train", "val"):
        path = Path(folder, "data", f"{split}.cache", "manifest.json")
        if not path.is_file():
            return NOT_MADE
        found.append(f"{split}={read_json(path)['digest']}")
    return " ".join(found)


def image_digest(image: str, contained: bool) -> str:
    """What tells one container from another: `none` on the host itself, the digest in an image's
    reference, or that which was written beside a local one when it was built."""
    if not contained:
        return NO_IMAGE
    if "@sha256:" in image:
        return image.rpartition("@")[2]
    path = Path(image).with_suffix(".digest")
    if not path.is_file():
        raise UserError(f"{image} has no digest beside it; build it with containers/build")
    return path.read_text(encoding="utf-8").strip()


def work_folder(results: str, values: Mapping[str, str]) -> str:
    """Where a run of these values keeps its checkpoints: never shared by two different runs."""
    kept = {name: values[name] for name in ("code", "env", "config", "data")}
    return f"{results}/work/{fingerprint(kept)[:16]}"

"""The values that a job's result follows from, each one line of text."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json
from sparkgpt.fingerprint import ROOT, fingerprint, libraries_of
from sparkgpt.pipeline.texts import read_text

# Imported under another name than it is installed under.
DISTRIBUTIONS = {"mlx_lm": "mlx-lm", "flash_attn": "flash-attn"}
# Library -> packages that do its work, though none of our sources imports them.
BENEATH = {
    "transformers": ("tokenizers",),
    "mlx_lm": ("transformers", "tokenizers"),
    "mlx": ("mlx-cpu", "mlx-metal"),
}
# Rule -> the stage whose code and libraries it runs, and its values. A fetch has no code: the pin
# fixes the bytes, so that an edit must not download them again.
RULES = {
    "fetch": ("fetch", ("source",)),
    "verify": ("fetch", ("code", "source", "shell")),
    "prepare": ("prepare", ("code", "env", "image", "shell", "sources", "config")),
    "cache": ("cache", ("code", "env", "image", "shell")),
    "autotune": ("autotune", ("code", "env", "image", "shell", "config")),
    "ready": ("", ("shell",)),
    "train": ("train", ("code", "env", "image", "shell", "config", "data")),
    "coordinates": ("coordinates", ("code", "env", "image", "shell")),
    "export": ("export", ("code", "env", "image", "shell")),
    "check_hf": ("check", ("code", "env", "image", "shell")),
    "check_mlx": ("check", ("code", "env", "image", "shell")),
    "compare": ("compare", ("code", "env", "image", "shell", "pairs", "runs")),
    "tables": ("tables", ("code", "env", "image", "shell", "runs")),
    "plot": ("plots", ("code", "env", "image", "shell", "runs")),
    "rulegraph": ("graph", ("code", "env", "image", "shell", "config")),
    "page": ("report", ("code", "env", "image", "shell", "runs")),
}
NO_IMAGE = "none"
NOT_MADE = "not made yet"
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^\s\\]+(?: ; [^\\]*[^\\\s])?)", re.M)
RULE_LINE = re.compile(r"^(?:rule|checkpoint) (\w+):|^use rule (\w+) as (\w+) with:", re.M)
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
        parts = RULE_LINE.split(read_text(path))[1:]
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
        digest = read_json(path).get("digest")
        if type(digest) is not str:
            raise UserError(f"{path} names no digest; it is not what sparkgpt wrote, remove it")
        found.append(f"{split}={digest}")
    return " ".join(found)


def image_digest(image: str, contained: bool) -> str:
    """What tells one container from another: `none` on the host itself, or the digest that was
    written beside an image when it was built, and that is inside it. UserError without one."""
    if not contained:
        return NO_IMAGE
    path = Path(image).with_suffix(".digest")
    for file in (path, Path(image)):
        if not file.is_file():
            raise UserError(
                f"{file} is not there; run containers/build {path.stem}, or the pipeline without "
                "--sdm apptainer"
            )
    return check_digest(read_text(path).strip(), str(path))


def check_digest(text: str, where: str) -> str:
    """The digest of an image. UserError, naming where it was given, for any other text."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise UserError(
            f"{where}: {text!r} is no digest of an image, sha256:HEX as in containers/*.digest"
        )
    return text


def work_folder(results: str, values: Mapping[str, str]) -> str:
    """Where a run of these values keeps its checkpoints: never shared by two different runs."""
    kept = {name: values[name] for name in ("code", "env", "image", "config", "data")}
    return f"{results}/work/{fingerprint(kept)[:16]}"

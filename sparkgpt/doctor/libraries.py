"""Facts of the software: Python, packages against their pins, programs, container. No torch."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sparkgpt import image
from sparkgpt.doctor.findings import NO, OK, WARN
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

SECONDS = 30  # that a program may take to answer
PINS = ROOT / "requirements"


@dataclass(frozen=True)
class Tool:
    """Something that is used when it is there: a package or a program, why, and how to get it."""

    name: str
    purpose: str
    install: str
    program: str = ""  # the executable to look for, instead of a package
    missing: str = OK  # level of the finding when it isn't there


TOOLS = (
    Tool("torch", "training", "make env", missing=NO),
    Tool("triton", "compiled kernels, on CUDA only", "make env TORCH=cu130"),
    Tool("flash-attn", "an attention back end, on CUDA only", "pip install -e '.[cuda]'"),
    Tool("transformers", "check-export in transformers", "make env", missing=WARN),
    Tool("mlx-lm", "check-export in mlx", "make env", missing=WARN),
    Tool("snakemake", "the pipeline", "make env", missing=NO),
    Tool(
        "snakemake-executor-plugin-slurm",
        "the pipeline on SLURM, optional",
        "make env-slurm",
    ),
    Tool(
        "slurm",
        "jobs on a cluster, optional",
        "apt install slurm-wlm, or ask its operator",
        program="sbatch",
    ),
    Tool(
        "apptainer",
        "the pipeline in containers, optional",
        "see https://apptainer.org/docs/admin/main/installation.html",
        program="apptainer",
    ),
)


@dataclass(frozen=True)
class Pins:
    """Installed packages against the lock file: how many are pinned here, which differ
    (`name 1.0, pinned 1.1`), which are missing. `found` is False without a lock file."""

    found: bool
    count: int = 0
    differing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """`inside` names the engine this runs in (None: on the host); `digest` is the image's own
    identity, `expected` the one that the caller demands; `works` None: not tried."""

    inside: str | None
    digest: str | None
    expected: str | None
    works: bool | None
    note: str

    @property
    def wrong(self) -> bool:
        """Whether this is not the image that was demanded."""
        return self.expected is not None and self.expected != self.digest


@dataclass(frozen=True)
class Software:
    """`versions` maps the name of each Tool to its version, None where it is missing."""

    python: str
    executable: str
    versions: dict[str, str | None]
    pins: Pins
    container: Container


def read_software(images: list[Path]) -> Software:
    """What is installed; `images` are files that a working apptainer could be tried on."""
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        versions={tool.name: version_of(tool) for tool in TOOLS},
        pins=compare_pins(PINS),
        container=read_container(images),
    )


def version_of(tool: Tool) -> str | None:
    """A package's version or what a program answers to --version; None where there is none."""
    if not tool.program:
        return package_version(tool.name)
    if not shutil.which(tool.program):
        return None
    code, output = answer(tool.program, "--version")
    version = re.search(r"\d+(\.\d+)+", output)
    return version[0] if code == 0 and version else f"broken: {output or f'exit code {code}'}"


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare_pins(folder: Path) -> Pins:
    """Installed packages against base.lock.txt and torch.txt in `folder`.

    Lines whose marker is for another system or Python don't count. A local part of a version,
    +cpu or +cu130, is the machine's choice.
    """
    try:
        from packaging.requirements import Requirement

        texts = [(folder / name).read_text() for name in ("base.lock.txt", "torch.txt")]
    except (ImportError, OSError):
        return Pins(found=False)
    differing, missing, count = [], [], 0
    for line in "".join(texts).splitlines():
        text = line.rstrip(" \\")
        if "==" not in text or text.startswith((" ", "#")):
            continue
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        count += 1
        version = package_version(wanted.name)
        if version is None:
            missing.append(wanted.name)
        elif not wanted.specifier.contains(version, prereleases=True):
            differing.append(f"{wanted.name} {version}, pinned {str(wanted.specifier)[2:]}")
    return Pins(True, count, tuple(differing), tuple(missing))


def read_container(images: list[Path], root: Path = Path("/")) -> Container:
    """Whether this is a container and which, and whether apptainer can start one here."""
    inside = None
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        inside = "apptainer"
    elif (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        inside = "docker"
    digest = None
    if image.MARKER.is_file():
        inside = inside or "an image"
        try:
            digest = image.image_digest()
        except UserError:
            digest = f"unreadable: {image.MARKER}"
    expected = os.environ.get(image.EXPECTED) or None
    works, note = (None, "") if inside == "apptainer" else try_apptainer(images)
    return Container(inside, digest, expected, works, note)


def try_apptainer(images: list[Path]) -> tuple[bool | None, str]:
    """(it can start a container, how that is known); None where nothing could be tried."""
    if not shutil.which("apptainer"):
        return None, "not installed"
    built = next((path for path in images if path.is_file()), None)
    if built is None:
        return None, "not tried: no image is built yet"
    code, output = answer("apptainer", "exec", "--cleanenv", str(built), "true")
    return code == 0, f"started {built}" if code == 0 else output or f"exit code {code}"


def answer(*command: str) -> tuple[int, str]:
    """Exit code and last line of output of a program; never an exception, never a hang."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {SECONDS} s"
    except OSError as error:
        return 127, error.strerror or str(error)
    return result.returncode, (result.stdout.strip().splitlines() or [""])[-1]

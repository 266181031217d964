"""Which workflow profiles fit a machine, and why one doesn't."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.doctor.device import Device, fits_build
from sparkgpt.doctor.findings import size
from sparkgpt.doctor.host import Host
from sparkgpt.doctor.libraries import Software
from sparkgpt.doctor.needs import (
    FLOOR,
    HOST_WITH_CUDA,
    UNIFIED_FLOOR,
    check_need,
    data_need,
    disk_need,
    memory_need,
)
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

DEFAULT = "cpu"
GB10 = (12, 1)


@dataclass(frozen=True)
class Run:
    """One row of a profile's main table: what it trains and how many parameters that has."""

    label: str
    model: ModelConfig
    train: TrainConfig
    parameters: int
    seeds: int


@dataclass(frozen=True)
class Wanted:
    """A profile, read: its rows, the libraries its exports are checked in, unpinned sources."""

    name: str
    device: str
    image: str
    runs: tuple[Run, ...]
    checks: tuple[str, ...]
    unpinned: tuple[str, ...]


@dataclass(frozen=True)
class Obstacle:
    """Why a profile doesn't fit, and what to do."""

    reason: str
    advice: str


@dataclass(frozen=True)
class Fit:
    """Whether a profile can run: it can when `obstacles` is empty. Needs in bytes; `cautions` are
    what it had better not do at once."""

    name: str
    memory: int
    disk: int
    obstacles: tuple[Obstacle, ...] = ()
    cautions: tuple[Obstacle, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return not self.obstacles


def read_profiles() -> list[Wanted]:
    """Every profile of workflow/config. UserError when one is wrong or there is no checkout;
    ImportError when the pipeline's libraries are missing."""
    workflow = _workflow()
    names = sorted(path.stem for path in (ROOT / "workflow" / "config").glob("*.yaml"))
    return [
        _wanted(workflow.load_profile(workflow.read_profile(name) | {"profile": name}))
        for name in names
    ]


def _workflow():
    """The rules' own reader of profiles, which lies beside the package, not in it."""
    path = ROOT / "workflow" / "pipeline.py"
    if not path.is_file():
        raise UserError("the profiles are not here; run this in a checkout of the repository")
    spec = importlib.util.spec_from_file_location("sparkgpt_workflow", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _wanted(profile) -> Wanted:
    from sparkgpt.model.cost import parameter_counts

    runs = []
    for row in profile.groups["runs"].rows:
        model, train = profile.parsed(row.runs[0])
        total = parameter_counts(model)["total"]
        runs.append(Run(row.name, model, train, total, len(row.seeds)))
    return Wanted(
        profile.name,
        runs[0].train.device,
        profile.values["image"],
        tuple(runs),
        tuple(profile.values["checks"]),
        unpinned_sources(profile.values["sources"]),
    )


def unpinned_sources(sources: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the sources whose pins are left open in the profile."""
    return tuple(
        name for name, source in sources.items() if None in source.get("flags", {}).values()
    )


def room(device_type: str, host: Host, device: Device) -> int:
    """Bytes that a trainer may take on 'cpu' or 'cuda', the floor already left out."""
    if device_type == "cpu":
        return host.memory_available - FLOOR
    if device.unified:
        return host.memory_available - UNIFIED_FLOOR
    return device.free_bytes


def judge(wanted: Wanted, host: Host, device: Device, software: Software, sharing: int = 1) -> Fit:
    """Whether a profile fits. `sharing`: how many ranks train on this host at once,
    each with the memory of a whole run, save on devices with memory of their own."""
    kind = "cuda" if wanted.device == "cuda" or wanted.device == "auto" == device.type else "cpu"
    needs = [memory_need(run.model, run.train, run.parameters, kind) for run in wanted.runs]
    largest = wanted.runs[needs.index(max(needs))]
    disk = data_need(max(run.train.target_tokens for run in wanted.runs)) + sum(
        run.seeds * disk_need(run.model, run.train, run.parameters) for run in wanted.runs
    )
    beside = sharing if kind == "cpu" or device.unified else 1
    obstacles = _software_obstacles(wanted, software)
    if kind == "cuda" and device.type != "cuda":
        obstacles.append(_no_cuda(device))
    else:
        obstacles += _device_obstacles(kind, host, device, largest, max(needs) * beside)
    if host.disk_free < disk:
        obstacles.append(
            Obstacle(
                f"needs about {size(disk)} of disk, {host.disk_place} has {size(host.disk_free)}",
                "free space, or put results/ on a larger disk",
            )
        )
    cautions = _cautions(wanted, host)
    return Fit(wanted.name, max(needs), disk, tuple(obstacles), tuple(cautions))


def _software_obstacles(wanted: Wanted, software: Software) -> list[Obstacle]:
    versions = software.versions
    needed = {"torch": "torch", "snakemake": "snakemake"}
    needed |= {"transformers": "transformers"} if "transformers" in wanted.checks else {}
    needed |= {"mlx-lm": "mlx"} if "mlx" in wanted.checks else {}
    missing = [name for name in needed if not versions.get(name)]
    found = []
    if missing:
        found.append(Obstacle(f"{', '.join(missing)} not installed", "make env"))
    if wanted.unpinned:
        found.append(
            Obstacle(
                f"sources not pinned: {', '.join(wanted.unpinned)}",
                f"write revision and sha256 into workflow/config/{wanted.name}.yaml",
            )
        )
    return found


def _no_cuda(device: Device) -> Obstacle:
    if device.driver:
        return Obstacle(
            f"torch {device.torch} sees no CUDA device, though driver {device.driver} is loaded",
            "make env TORCH=cu130",
        )
    return Obstacle("needs a CUDA device; there is none here", "use a machine with one")


def _device_obstacles(
    kind: str, host: Host, device: Device, largest: Run, need: int
) -> list[Obstacle]:
    found = []
    if kind == "cuda":
        if reason := fits_build(device.capability, device.code_for, device.cuda or "?"):
            found.append(Obstacle(reason, "make env TORCH=cu130"))
        if device.backends.get(device.chosen, "none"):
            found.append(Obstacle("no attention back end computes", "see the section on attention"))
        if not device.unified and host.memory_available < HOST_WITH_CUDA:
            found.append(
                Obstacle(
                    f"host memory: {size(HOST_WITH_CUDA)} wanted beside the device's own, "
                    f"{size(host.memory_available)} available",
                    "end other programs",
                )
            )
    there = room(kind, host, device)
    if need > there:
        found.append(
            Obstacle(
                f"{largest.label} needs about {size(need)} of memory at a window of "
                f"{largest.train.tokens_per_batch:,}, {size(max(0, there))} may be taken",
                "end other programs, or lower tokens-per-batch in the profile",
            )
        )
    return found


def _cautions(wanted: Wanted, host: Host) -> list[Obstacle]:
    """Export checks run beside each other, one a core."""
    jobs = sum(run.seeds for run in wanted.runs) * len(wanted.checks)
    at_once = min(jobs, int(max(1, host.cores_usable)))
    each = max(check_need(run.parameters) for run in wanted.runs)
    fitting = int(max(0, host.memory_available - FLOOR) // each)
    if not jobs or at_once <= max(1, fitting):
        return []
    return [
        Obstacle(
            f"{at_once} export checks at once need {size(at_once * each)}",
            f"make reproduce PROFILE={wanted.name} CORES={max(1, fitting)}",
        )
    ]


def preferred(fits: list[Fit], device: Device) -> Fit | None:
    """The largest profile that this machine is for, among those that fit."""
    order = ["gb10"] if device.capability == GB10 else []
    order += ["gpu", "cpu", "smoke"]
    for name in order:
        for fit in fits:
            if fit.name == name and fit.fits:
                return fit
    return next((fit for fit in fits if fit.fits), None)


def command(name: str, device: str) -> str:
    """What to type to run a profile."""
    words = ["make reproduce"]
    words += ["TORCH=cu130"] if device == "cuda" else []
    words += [f"PROFILE={name}"] if name != DEFAULT else []
    return " ".join(words)

"""One process's diagnosis: its facts, gathered and judged."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sparkgpt.doctor import describe
from sparkgpt.doctor.ceiling import SPECIFICATIONS, Ceiling, ceiling
from sparkgpt.doctor.device import Device, Rates, measure_rates, read_device
from sparkgpt.doctor.findings import NO, Finding
from sparkgpt.doctor.host import Host, read_host
from sparkgpt.doctor.libraries import Software, read_software
from sparkgpt.doctor.profiles import (
    DEFAULT,
    Fit,
    Obstacle,
    Wanted,
    command,
    judge,
    preferred,
    read_profiles,
)
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT

SCHEMA = 1


@dataclass(frozen=True)
class Facts:
    """What one process found out; `device` is None without a torch that imports, `rates` without
    a device that computes. `broken` is then the reason."""

    host: Host
    software: Software
    device: Device | None
    rates: Rates | None
    broken: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The judged facts; `fits` is whether the profile asked for, or the default one, can run."""

    findings: list[Finding]
    profiles: list[Fit]
    chosen: Fit | None
    ceilings: dict[str, Ceiling]
    fits: bool


def gather(device_index: int = 0) -> Facts:
    """Look at this machine; measures for about one and a half seconds."""
    images = sorted((ROOT / "containers").glob("*.sif"))
    host, software = read_host(ROOT / "results"), read_software(images)
    try:
        import torch

        from sparkgpt.distributed import choose_device
    except (ImportError, OSError) as error:  # OSError: a shared library that can't be loaded
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Facts(host, software, None, None, reason)
    name = choose_device("auto")
    device = read_device(name, device_index)
    free = host.memory_available if name == "cpu" or device.unified else device.free_bytes
    place = torch.device("cpu") if name == "cpu" else torch.device("cuda", device_index)
    try:
        return Facts(host, software, device, measure_rates(place, free))
    except RuntimeError as error:
        return Facts(host, software, device, None, str(error).split("\n")[0])


def diagnose(facts: Facts, profile: str, sharing: int = 1) -> Diagnosis:
    """Judge facts. UserError when there is no profile of that name."""
    host, software, device = facts.host, facts.software, facts.device
    findings = describe.system(host, device) + describe.libraries(software)
    if device is None:
        findings.append(Finding("device", NO, "torch", facts.broken, "make env"))
        findings += describe.container(software.container)
        return Diagnosis(findings, [], None, {}, False)
    findings += describe.devices(host, device) + describe.attention(device)
    findings += describe.container(software.container)
    wanted, found = profiles_or_why()
    fits = [judge(each, host, device, software, sharing) for each in wanted]
    chosen = choose(fits, profile, device)
    findings += found + describe.profiles(fits, chosen, device.type)
    rows: dict[str, Ceiling] = {}
    if facts.rates is None:
        findings.append(Finding("speed", NO, "torch", f"can't compute: {facts.broken}", "make env"))
    else:
        findings += describe.rates(facts.rates, device.name)
        if chosen:
            rows = ceilings_of(next(w for w in wanted if w.name == chosen.name), facts)
        findings += describe.ceilings(rows)
    judged = next((fit for fit in fits if fit.name == (profile or DEFAULT)), None)
    good = judged is not None and judged.fits and facts.rates is not None
    return Diagnosis(findings, fits, chosen, rows, good and not software.container.wrong)


def profiles_or_why() -> tuple[list[Wanted], list[Finding]]:
    """The profiles, or the finding that says why they can't be read."""
    try:
        return read_profiles(), []
    except UserError as error:
        return [], describe.unread_profiles(Obstacle(str(error), ""))
    except ImportError as error:
        return [], describe.unread_profiles(Obstacle(f"{error.name} not installed", "make env"))


def choose(fits: list[Fit], profile: str, device: Device) -> Fit | None:
    """The profile asked for, else the one that this machine is best for."""
    if not profile or not fits:
        return preferred(fits, device)
    for fit in fits:
        if fit.name == profile:
            return fit
    names = ", ".join(fit.name for fit in fits)
    raise UserError(f"--profile {profile}: there is none of that name; choose from {names}")


def ceilings_of(wanted: Wanted, facts: Facts) -> dict[str, Ceiling]:
    """A ceiling for each shape of a profile: at measured rates where its device is here, else at
    a GB10's specification."""
    shapes: dict[tuple, str] = {}
    for run in wanted.runs:
        key = (run.model, run.train.tokens_per_batch, run.train.accumulate, run.train.optimizer)
        shapes.setdefault(key, run.label)
    here = facts.device.type == wanted.device or wanted.device in ("auto", "cpu")
    if here:
        rate = (wanted.device, facts.rates.gemm, facts.rates.copy, "measured")
    else:
        gb10 = SPECIFICATIONS["NVIDIA GB10"]
        rate = ("cuda", gb10.gemm, gb10.copy, "a GB10's specified")
    runs = {run.label: run for run in wanted.runs if run.label in shapes.values()}
    return {label: ceiling(run.model, run.train, *rate) for label, run in runs.items()}


def as_json(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as one object: findings, facts, profiles with reasons, ceilings."""
    device = facts.device.type if facts.device else "cpu"
    chosen = diagnosis.chosen
    return {
        "schema": SCHEMA,
        "ok": diagnosis.fits,
        "profile": chosen.name if chosen else None,
        "command": command(chosen.name, device) if chosen and chosen.fits else None,
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
        "facts": dataclasses.asdict(facts),
        "profiles": [dataclasses.asdict(fit) | {"fits": fit.fits} for fit in diagnosis.profiles],
        "ceilings": {
            label: dataclasses.asdict(c) | {"tokens_per_second": c.tokens_per_second}
            for label, c in diagnosis.ceilings.items()
        },
    }

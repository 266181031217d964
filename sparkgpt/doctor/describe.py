"""From facts to findings: pure functions, one a section."""

from sparkgpt.doctor.ceiling import COMPUTE_FORMULA, MEMORY_FORMULA, SPECIFICATIONS, Ceiling
from sparkgpt.doctor.device import Device, Rates, fits_build
from sparkgpt.doctor.findings import NO, OK, WARN, Finding, size
from sparkgpt.doctor.host import Host
from sparkgpt.doctor.libraries import TOOLS, Container, Software
from sparkgpt.doctor.needs import FLOOR, UNIFIED_FLOOR
from sparkgpt.doctor.profiles import Fit, Obstacle, command, room

LISTED = 3  # packages named in one line
BUSY = 0.9  # below this share of the cores, a measured rate isn't the machine's


def system(host: Host, device: Device | None) -> list[Finding]:
    """Operating system, cores, memory against its floor, disk."""
    add = _section("system")
    found = [
        add(OK, "system", f"{host.system}, {host.machine}, {host.cpu}"),
        _cores(host, device),
    ]
    limit = f", limited to {size(host.memory_limit)} by the cgroup" if host.memory_limit else ""
    floor = UNIFIED_FLOOR if device and device.unified else FLOOR
    found.append(
        add(
            OK if host.memory_available > floor else NO,
            "memory",
            f"{size(host.memory_available)} available of {size(host.memory_total)}{limit}; "
            f"{size(floor)} stay free",
            "" if host.memory_available > floor else "end other programs",
        )
    )
    found.append(add(OK, "disk", f"{size(host.disk_free)} free at {host.disk_place}"))
    return found


def _cores(host: Host, device: Device | None) -> Finding:
    usable = f"{host.cores_usable:g} usable of {host.cores}"
    if not device:
        return Finding("system", OK, "cores", usable)
    detail = f"{usable}, torch uses {device.threads} threads"
    if device.threads > max(1, host.cores_usable):
        advice = f"export OMP_NUM_THREADS={max(1, int(host.cores_usable))}"
        return Finding("system", WARN, "cores", detail, advice)
    return Finding("system", OK, "cores", detail)


def libraries(software: Software) -> list[Finding]:
    """Python, the pins, and each package and program with its purpose; a missing one is a fault
    only where nothing runs without it."""
    add = _section("libraries")
    found = [add(OK, "python", f"{software.python} ({software.executable})"), _pins(software)]
    for tool in TOOLS:
        version = software.versions.get(tool.name)
        if version and not version.startswith("broken"):
            found.append(add(OK, tool.name, f"{version}: {tool.purpose}"))
        else:
            level = tool.missing if not version else WARN
            detail = f"{version or 'missing'}: {tool.purpose}"
            found.append(add(level, tool.name, detail, tool.install))
    return found


def _pins(software: Software) -> Finding:
    add, pins = _section("libraries"), software.pins
    if not pins.found:
        return add(WARN, "pins", "no lock file here, or nothing to read it with", "make env")
    wrong = [*pins.differing, *(f"{name} missing" for name in pins.missing)]
    if not wrong:
        return add(OK, "pins", f"all {pins.count} packages as pinned in requirements/")
    more = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
    detail = f"{len(wrong)} of {pins.count} differ: {'; '.join(wrong[:LISTED])}{more}"
    return add(WARN, "pins", detail, "make env")


def devices(host: Host, device: Device) -> list[Finding]:
    """What torch computes on, whether its build fits, and the memory it may take."""
    add = _section("device")
    if device.type == "cpu":
        found = [add(OK, "cpu", f"{host.cpu}, float32, torch {device.torch}")]
        if device.driver:
            detail = f"driver {device.driver} is loaded, but torch {device.torch} sees no device"
            found.append(add(WARN, "cuda", detail, "make env TORCH=cu130"))
        return found
    capability = ".".join(map(str, device.capability))
    found = [
        add(
            OK,
            "cuda",
            f"{device.count} x {device.name}, capability {capability}, "
            f"{device.multiprocessors} multiprocessors, driver {device.driver or 'unknown'}, "
            f"CUDA {device.cuda}",
        ),
        _build(device),
    ]
    there = size(max(0, room("cuda", host, device)))
    if device.unified:
        detail = f"unified with the host: {there} may be taken (MemAvailable, less the floor)"
    else:
        detail = f"{there} free of {size(device.memory_bytes)}"
    return [*found, add(OK, "device memory", detail)]


def _build(device: Device) -> Finding:
    add = _section("device")
    if reason := fits_build(device.capability, device.code_for, device.cuda or "?"):
        return add(NO, "torch build", reason, "make env TORCH=cu130")
    detail = f"torch {device.torch} has code for this device"
    if device.capability >= (12, 0) and int((device.cuda or "0").split(".")[0]) < 13:
        slow = f"{detail}, but its cuBLAS, older than CUDA 13, is slow on it"
        return add(WARN, "torch build", slow, "make env TORCH=cu130")
    return add(OK, "torch build", detail)


def attention(device: Device) -> list[Finding]:
    """Each back end, tried on two short documents, and the one that 'auto' takes."""
    add = _section("attention")
    foreign = {"cpu": ("flash-attn", "varlen"), "cuda": ()}[device.type]
    found = []
    for name, reason in device.backends.items():
        if name in foreign:
            continue
        advice = "" if not reason or name != "flash-attn" else "pip install -e '.[cuda]'"
        detail = reason.split("; ")[0] or "computes, forward and backward"
        found.append(add(WARN if reason else OK, name, detail, advice))
    fails = device.backends.get(device.chosen, "none is left")
    detail = f"{device.chosen or 'none'}; the pipeline's autotune may choose another"
    found.append(add(NO if fails else OK, "chosen", detail))
    return found


def container(state: Container) -> list[Finding]:
    """Where this runs, whether it is the image that was asked for, and whether apptainer works."""
    add = _section("container")
    place = f"inside {state.inside}, image {state.digest or 'unknown'}"
    found = [add(OK, "container", place if state.inside else "not inside one")]
    if state.wrong:
        detail = f"{state.expected} is expected, this is {state.digest or 'no image'}"
        found.append(add(NO, "image", detail, "containers/build, or run without --sdm apptainer"))
    if state.inside != "apptainer":
        level = {True: OK, False: NO, None: WARN}[state.works]
        advice = {
            "not installed": next(t.install for t in TOOLS if t.name == "apptainer"),
            "not tried: no image is built yet": "containers/build cpu, gpu or gb10",
        }.get(state.note, "" if state.works else "see `apptainer exec IMAGE true`")
        found.append(add(level, "apptainer", state.note, advice))
    return found


def profiles(fits: list[Fit], chosen: Fit | None, device_type: str) -> list[Finding]:
    """One line a profile, and the command for the chosen one."""
    add = _section("profiles")
    found = []
    for fit in fits:
        needs = f"about {size(fit.memory)} of memory, {size(fit.disk)} of disk"
        if fit.fits:
            found.append(add(OK, fit.name, f"fits: {needs}"))
        for obstacle in fit.obstacles:
            found.append(add(NO, fit.name, obstacle.reason, obstacle.advice))
        if fit.fits:
            found += [add(WARN, fit.name, c.reason, c.advice) for c in fit.cautions]
    if chosen and chosen.fits:
        found.append(add(OK, "run", chosen.name, command(chosen.name, device_type)))
    return found


def unread_profiles(obstacle: Obstacle) -> list[Finding]:
    """When the profiles can't be read at all."""
    return [Finding("profiles", NO, "profiles", obstacle.reason, obstacle.advice)]


def rates(measured: Rates, name: str) -> list[Finding]:
    """What was measured, beside the specification where there is one."""
    add = _section("speed")
    found = [
        add(
            OK,
            "GEMM rate",
            f"measured {flops(measured.gemm)} at best, {flops(measured.gemm_median)} in the "
            f"median ({measured.what})",
        ),
        add(
            OK,
            "memory bandwidth",
            f"measured {measured.copy / 1e9:.1f} GB/s at best, "
            f"{measured.copy_median / 1e9:.1f} GB/s in the median, read and written",
        ),
    ]
    if measured.share < BUSY:
        detail = f"torch's threads got {measured.share:.0%} of their time; the rates are too low"
        found.append(add(WARN, "other programs", detail, "end them, and measure again"))
    if name in SPECIFICATIONS:
        spec = SPECIFICATIONS[name]
        detail = f"{flops(spec.gemm)} dense bf16, {spec.copy / 1e9:,.0f} GB/s ({spec.note})"
        found.append(add(OK, "specification", detail))
    return found


def ceilings(rows: dict[str, Ceiling]) -> list[Finding]:
    """The floors of a step for each row of a profile, and the formulas."""
    add = _section("ceiling")
    found = [
        add(
            OK,
            label,
            f"at most {c.tokens_per_second:,.0f} window tok/s, {c.bound}-bound; a step of "
            f"{c.tokens:,}: compute floor {c.compute_floor * 1e3:,.1f} ms, memory floor "
            f"{c.memory_floor * 1e3:,.1f} ms for {c.traffic / 1e9:,.1f} GB, "
            f"{c.traffic_unfused / 1e9:,.1f} GB unfused "
            f"({c.source} rates, documents of {c.document:,})",
        )
        for label, c in rows.items()
    ]
    if found:
        found.append(add(OK, "compute floor", COMPUTE_FORMULA))
        found.append(add(OK, "memory floor", f"{MEMORY_FORMULA}; a CPU's caches can beat it"))
    return found


def flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GFLOP/s"


def _section(name: str):
    return lambda *rest: Finding(name, *rest)

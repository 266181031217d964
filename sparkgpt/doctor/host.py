"""Facts of the machine: system, cores, memory, disk, network. Standard library only.

Files are read below `root`, so that a test can lay out a machine as a folder.
"""

import os
import platform
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "cni", "flannel")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; `mtu` in bytes, `mbits` None where the driver tells none."""

    name: str
    mtu: int
    mbits: int | None


@dataclass(frozen=True)
class Host:
    """Memory and disk in bytes. `memory_limit` is the cgroup's, None without one;
    `memory_available` is what a new process may take before the machine or the cgroup is full."""

    system: str
    machine: str
    cpu: str
    hostname: str
    cores: int
    cores_usable: float
    memory_total: int
    memory_available: int
    memory_limit: int | None
    disk_place: str
    disk_free: int
    interfaces: tuple[Interface, ...]
    rdma: tuple[str, ...]


def read_host(results: Path, root: Path = Path("/")) -> Host:
    """The machine as it is now; `results` is where the pipeline writes."""
    total, available = memory(root)
    limit, room = memory_limit(root)
    place = existing(results)
    return Host(
        system=" ".join((platform.system(), platform.release(), *platform.libc_ver())).strip(),
        machine=platform.machine(),
        cpu=cpu_name(root),
        hostname=socket.gethostname(),
        cores=os.cpu_count() or 1,
        cores_usable=min(cores_allowed(), cpu_quota(root) or float("inf")),
        memory_total=total,
        memory_available=available if room is None else min(available, room),
        memory_limit=limit,
        disk_place=str(place),
        disk_free=shutil.disk_usage(place).free,
        interfaces=interfaces(root),
        rdma=names_in(root / "sys/class/infiniband"),
    )


def cores_allowed() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes. MemAvailable counts the page cache as free, MemFree doesn't."""
    values = {}
    for line in lines_of(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    if "MemAvailable" in values:
        return values["MemTotal"], values["MemAvailable"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total  # macOS tells no more without a library


def memory_limit(root: Path) -> tuple[int | None, int | None]:
    """The tightest cgroup's (limit, bytes still free below it); Nones without a limit.

    Page cache that the kernel can drop (`inactive_file`) counts as free.
    """
    tightest: tuple[int | None, int | None] = (None, None)
    for folder in cgroup_folders(root, "memory"):
        limit = number_in(folder, "memory.max", "memory.limit_in_bytes")
        used = number_in(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= NO_LIMIT:
            continue
        stat = dict(line.split() for line in lines_of(folder / "memory.stat"))
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        room = max(0, limit - max(0, used - cache))
        if tightest[1] is None or room < tightest[1]:
            tightest = (limit, room)
    return tightest


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the tightest cgroup grants; None without a quota."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        words = " ".join(lines_of(folder / "cpu.max")).split()
        if not words:
            quota, period = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            words = [text for name in (quota, period) for text in lines_of(folder / name)]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup and those above it, as far as they are visible; version 2 or 1."""
    folders = []
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        folders += [base / part for part in (inner, *inner.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def cpu_name(root: Path) -> str:
    """The processor's name; Arm kernels tell none, the architecture must do there."""
    for line in lines_of(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def interfaces(root: Path) -> tuple[Interface, ...]:
    """Network interfaces that are up, without loopback, bridges and containers' own."""
    found = []
    for name in names_in(root / "sys/class/net"):
        folder = root / "sys/class/net" / name
        if name.startswith(VIRTUAL) or lines_of(folder / "operstate") != ["up"]:
            continue
        speed = number_in(folder, "speed")
        found.append(Interface(name, number_in(folder, "mtu") or 0, speed if speed != -1 else None))
    return tuple(found)


def existing(path: Path) -> Path:
    """The nearest folder above `path` that is there: its disk is the one written to."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def names_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def number_in(folder: Path, *names: str) -> int | None:
    """The whole number that the first of these files holds; None when none of them does."""
    for name in names:
        for line in lines_of(folder / name)[:1]:
            if line.lstrip("-").isdigit():
                return int(line)
    return None


def lines_of(path: Path) -> list[str]:
    """Lines of a file of the kernel's; none where it is missing or refuses to be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

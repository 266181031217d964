"""From what ranks found to findings about them: agreement, network, predicted speed-up. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from sparkgpt.doctor.ceiling import Ceiling
from sparkgpt.doctor.describe import flops
from sparkgpt.doctor.device import Device, Rates
from sparkgpt.doctor.findings import NO, OK, WARN, Finding, size
from sparkgpt.doctor.host import Host

BUS_FORMULA = "bus = bytes / seconds x 2 (n - 1) / n"
SPEEDUP_FORMULA = "n t / (t + all-reduce of 4P + 16P / copy rate), t the step's floor"
VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
JUMBO = 9000  # bytes; smaller frames cost a fast link much of its rate


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others. `alike` must be equal on all: versions and code;
    `variables` are the settings of the network that it was started with."""

    rank: int
    host: Host
    device: Device
    rates: Rates
    alike: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AllReduce:
    """One size: bytes of the tensor, and the slowest rank's median seconds."""

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes of the tensor a second."""
        return self.bytes / self.seconds

    def bus_rate(self, ranks: int) -> float:
        """What each link carried: a ring sends 2 (n - 1) / n of the tensor over each."""
        return self.rate * 2 * (ranks - 1) / ranks


def all_ranks(everyone: list[RankFacts]) -> list[Finding]:
    """One line a rank, whether they agree, and how they share their hosts' cores."""
    found = [
        Finding(
            "ranks",
            OK,
            f"rank {one.rank}",
            f"{one.host.hostname}, {one.device.name or one.host.cpu}, "
            f"{one.device.threads} threads, {flops(one.rates.gemm)}, "
            f"{one.rates.copy / 1e9:.1f} GB/s, all ranks measured at once",
        )
        for one in everyone
    ]
    return [*found, *agreement(everyone), *sharing(everyone)]


def agreement(everyone: list[RankFacts]) -> list[Finding]:
    """Whether versions, code and kind of device are those of rank 0."""
    first = everyone[0]
    found = []
    for one in everyone[1:]:
        mine = one.alike | {"device": one.device.name or one.device.type}
        other = first.alike | {"device": first.device.name or first.device.type}
        differing = [name for name in other if mine.get(name) != other[name]]
        if differing:
            values = ", ".join(f"{n} {mine.get(n)} (rank 0: {other[n]})" for n in differing)
            advice = "the same checkout, `make env` and device on every host"
            found.append(Finding("ranks", NO, "ranks agree", f"rank {one.rank}: {values}", advice))
    names = ", ".join((*first.alike, "device"))
    return found or [Finding("ranks", OK, "ranks agree", names)]


def sharing(everyone: list[RankFacts]) -> list[Finding]:
    """Where the ranks of a host want more threads than it has cores."""
    found = []
    for name, count in Counter(one.host.hostname for one in everyone).items():
        here = [one for one in everyone if one.host.hostname == name]
        threads, cores = sum(one.device.threads for one in here), here[0].host.cores_usable
        if threads > cores:
            detail = f"{count} ranks on {name} want {threads} threads, {cores:g} cores are usable"
            advice = f"export OMP_NUM_THREADS={max(1, int(cores // count))}"
            found.append(Finding("ranks", WARN, "threads", detail, advice))
    return found


def network(everyone: list[RankFacts], backend: str, measured: list[AllReduce]) -> list[Finding]:
    """The all-reduce at each size, and hints about interfaces."""
    ranks = len(everyone)
    found = [
        Finding(
            "network",
            OK,
            f"all-reduce {size(one.bytes)}",
            f"{one.seconds * 1e3:.3f} ms, {one.rate / 1e9:.3f} GB/s, bus "
            f"{one.bus_rate(ranks) / 1e9:.3f} GB/s",
        )
        for one in measured
    ]
    detail = f"{backend}, {ranks} ranks, latency {latency(measured) * 1e6:.0f} us; {BUS_FORMULA}"
    return [*found, Finding("network", OK, "all-reduce", detail), *interface_hints(everyone)]


def interface_hints(everyone: list[RankFacts]) -> list[Finding]:
    """Settings that name no interface of their host; with several hosts, settings that are open."""
    hosts = {one.host.hostname: one for one in everyone}
    found = []
    for name, one in hosts.items():
        up = one.host.interfaces
        listed = ", ".join(_describe(item) for item in up) or "none"
        names = [item.name for item in up]
        wrong = [
            f"{variable}={value}"
            for variable, value in one.variables.items()
            if not any(_named(value, known) for known in names)
        ]
        fastest = max(up, key=lambda item: item.mbits or 0).name if up else "INTERFACE"
        advice = " ".join(f"export {v}={fastest}" for v in VARIABLES.values())
        if wrong and up:
            detail = f"{name}: {', '.join(wrong)}, but these are up: {listed}"
            found.append(Finding("network", NO, "interface", detail, advice))
        elif len(hosts) > 1 and not one.variables:
            detail = f"{name}: no interface is chosen; up: {listed}"
            found.append(Finding("network", WARN, "interface", detail, advice))
        else:
            rdma = f"; RDMA: {', '.join(one.host.rdma)}" if one.host.rdma else ""
            found.append(Finding("network", OK, "interface", f"{name}: {listed}{rdma}"))
        small = [item.name for item in up if (item.mbits or 0) >= 10_000 and item.mtu < JUMBO]
        if len(hosts) > 1 and small:
            detail = f"{name}: {', '.join(small)} with frames below {JUMBO} bytes"
            advice = f"ip link set {small[0]} mtu {JUMBO}, on every host"
            found.append(Finding("network", WARN, "MTU", detail, advice))
    return found


def _describe(item) -> str:
    speed = f", {item.mbits / 1000:g} Gbit/s" if item.mbits else ""
    return f"{item.name} (MTU {item.mtu}{speed})"


def _named(value: str, interface: str) -> bool:
    """Whether a setting, a list of prefixes (`=` exact, `^` all but these), can mean this one."""
    if value.startswith("^"):
        return not any(interface.startswith(part) for part in value[1:].split(","))
    return any(
        interface == part[1:] if part.startswith("=") else interface.startswith(part)
        for part in value.split(",")
    )


def latency(measured: list[AllReduce]) -> float:
    """Seconds of the smallest all-reduce."""
    return min(measured, key=lambda one: one.bytes).seconds


def all_reduce_seconds(count: int, measured: list[AllReduce]) -> float:
    """Seconds for `count` bytes: on the line between the sizes measured, at the rate of the last
    two beyond them. At least two sizes."""
    sizes = sorted(measured, key=lambda one: one.bytes)
    above = next((i for i, one in enumerate(sizes) if one.bytes >= count), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    slope = (high.seconds - low.seconds) / (high.bytes - low.bytes)
    return max(low.seconds, low.seconds + slope * (count - low.bytes))


def predicted_speedup(
    step: Ceiling, parameters: int, ranks: int, measured: list[AllReduce], copy: float
) -> float:
    """How many times one rank's tokens/s `ranks` ranks reach, each with its own windows.

    The gradients, 4P bytes in float32, are summed in one flat buffer after the backward: nothing
    overlaps, and filling and emptying the buffer moves 16P bytes. A real step is longer than its
    floor, so that the real speed-up is above this.
    """
    alone = max(step.compute_floor, step.memory_floor)
    exchange = all_reduce_seconds(4 * parameters, measured) + 16 * parameters / copy
    return ranks * alone / (alone + exchange)


def scaling(speedups: dict[str, float], ranks: int) -> list[Finding]:
    """The predictions, a line a shape, and their formula."""
    found = [
        Finding(
            "scaling",
            OK,
            label,
            f"predicted {speedup:.2f} times one such rank on {ranks} ranks "
            f"({speedup / ranks:.0%} of {ranks})",
        )
        for label, speedup in speedups.items()
    ]
    if found:
        found.append(Finding("scaling", OK, "speed-up", SPEEDUP_FORMULA))
    return found

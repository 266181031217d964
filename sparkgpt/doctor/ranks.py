"""The doctor under torchrun: every rank looks at itself, together they measure the network."""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from sparkgpt.distributed import Ranks, broadcast_object, gather_objects, start, stop, synchronize
from sparkgpt.doctor.diagnosis import SCHEMA, Diagnosis, Facts, as_json, diagnose, gather
from sparkgpt.doctor.findings import OK, Finding, render
from sparkgpt.doctor.host import interfaces
from sparkgpt.doctor.profiles import read_profiles
from sparkgpt.doctor.scaling import (
    VARIABLES,
    AllReduce,
    RankFacts,
    all_ranks,
    network,
    predicted_speedup,
    scaling,
)
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import code_digest
from sparkgpt.provenance import versions

TIMEOUT = 60  # seconds that a rank waits for the others
SIZES = tuple(2**power for power in (12, 16, 20, 24, 26))  # bytes: 4 KiB to 64 MiB
SECONDS = 0.3  # for one size
REPEATS = (3, 200)


def run(profile: str, json_wanted: bool) -> int:
    """Diagnose all ranks; rank 0 prints. Returns 0 on every rank when all of them can run."""
    local, rank = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["RANK"])
    devices = torch.cuda.device_count()
    if local >= devices > 0:
        raise UserError(
            f"rank {rank}: this host has {devices} CUDA devices, and local rank {local} wants one "
            f"of its own; start at most {devices} ranks here"
        )
    with meeting(rank):
        # gloo even beside CUDA: facts must travel when only one of the hosts sees its device.
        ranks = start(torch.device("cpu"), TIMEOUT)
    try:
        facts = gather(local)
        if facts.rates is None:
            raise UserError(f"rank {rank}: torch can't compute here: {facts.broken}", exit_code=1)
        with meeting(rank):
            hosts = gather_objects(facts.host.hostname, ranks)
        diagnosis = diagnose(facts, profile, sharing=hosts.count(facts.host.hostname))
        with meeting(rank):
            everyone = gather_objects((tell(facts, rank), diagnosis, facts), ranks)
            kinds = {told.device.type for told, _, _ in everyone}
            backend, measured = measure(ranks, cuda=kinds == {"cuda"}, local=local)
        return conclude(everyone, backend, measured, json_wanted if ranks.is_main else None)
    finally:
        stop(ranks)


def tell(facts: Facts, rank: int) -> RankFacts:
    """What the other ranks need to know about this one."""
    alike = {k: v for k, v in versions().items() if k in ("python", "torch", "numpy", "triton")}
    alike["code"] = code_digest("train")[:12]
    variables = {v: os.environ[v] for v in VARIABLES.values() if os.environ.get(v)}
    return RankFacts(rank, facts.host, facts.device, facts.rates, alike, variables)


@contextmanager
def meeting(rank: int) -> Iterator[None]:
    """Around what all ranks do at once: UserError that speaks of the network."""
    try:
        yield
    except (UserError, RuntimeError) as error:
        said = str(error.__cause__ or error).split("\n")[0].removesuffix(".")
        settings = ", ".join(f"{v}={os.environ.get(v, '')}" for v in VARIABLES.values())
        up = ", ".join(item.name for item in interfaces(Path("/"))) or "none"
        raise UserError(
            f"rank {rank}: the ranks did not find each other, or one is gone ({said}; {settings}; "
            f"interfaces up: {up}); start as many as torchrun was told, let every host reach "
            "MASTER_ADDR and MASTER_PORT, and name the interface between them in both variables",
            exit_code=1,
        ) from error


def measure(ranks: Ranks, cuda: bool, local: int) -> tuple[str, list[AllReduce]]:
    """Median all-reduce times of float32 tensors, nccl where every rank has CUDA, else gloo."""
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl") if cuda else dist.group.WORLD
    found = []
    for count in SIZES:
        tensor = torch.zeros(count // 4, device=device)
        trial = [timed(tensor, group) for _ in range(2)][-1]
        fewest, most = REPEATS
        repeats = broadcast_object(max(fewest, min(most, int(SECONDS / trial))), ranks)
        median = statistics.median(timed(tensor, group) for _ in range(repeats))
        found.append(AllReduce(count, max(gather_objects(median, ranks))))
    return "nccl" if cuda else "gloo", found


def timed(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce on this rank."""
    synchronize(tensor.device)
    begun = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    synchronize(tensor.device)
    return time.perf_counter() - begun


def conclude(
    everyone: list[tuple[RankFacts, Diagnosis, Facts]],
    backend: str,
    measured: list[AllReduce],
    json_wanted: bool | None,
) -> int:
    """The joint findings, printed as JSON (True), as lines (False) or not at all (None)."""
    told = [one for one, _, _ in everyone]
    shared = all_ranks(told) + network(told, backend, measured)
    speedups = predictions(everyone, measured)
    shared += scaling(speedups, len(told))
    good = all(d.fits for _, d, _ in everyone) and all(f.level != "no" for f in shared)
    if json_wanted:
        count = len(told)
        rows = [
            dataclasses.asdict(one) | {"rate": one.rate, "bus_rate": one.bus_rate(count)}
            for one in measured
        ]
        value = {
            "schema": SCHEMA,
            "ok": good,
            "findings": [dataclasses.asdict(finding) for finding in shared],
            "ranks": [{"rank": one.rank} | as_json(facts, d) for one, d, facts in everyone],
            "allreduce": {"backend": backend, "sizes": rows},
            "speedup": speedups,
        }
        print(json.dumps(value))
    elif json_wanted is not None:
        print(render(everyone[0][1].findings + others(everyone) + shared))
    return 0 if good else 1


def predictions(
    everyone: list[tuple[RankFacts, Diagnosis, Facts]], measured: list[AllReduce]
) -> dict[str, float]:
    """Speed-up for each shape of the chosen profile, at the pace of the slowest rank."""
    _, diagnosis, _ = everyone[0]
    if not diagnosis.ceilings:
        return {}
    copy = min(told.rates.copy for told, _, _ in everyone)
    wanted = next(w for w in read_profiles() if w.name == diagnosis.chosen.name)
    parameters = {run.label: run.parameters for run in wanted.runs}
    found = {}
    for label in diagnosis.ceilings:
        steps = [d.ceilings[label] for _, d, _ in everyone if label in d.ceilings]
        slowest = max(steps, key=lambda step: max(step.compute_floor, step.memory_floor))
        count = len(everyone)
        found[label] = predicted_speedup(slowest, parameters[label], count, measured, copy)
    return found


def others(everyone: list[tuple[RankFacts, Diagnosis, Facts]]) -> list[Finding]:
    """What ranks but the first found that the first did not."""
    known = {(f.what, f.level, f.detail) for f in everyone[0][1].findings}
    return [
        dataclasses.replace(f, section=f"rank {told.rank}, on {told.host.hostname}")
        for told, diagnosis, _ in everyone[1:]
        for f in diagnosis.findings
        if f.level != OK and (f.what, f.level, f.detail) not in known
    ]

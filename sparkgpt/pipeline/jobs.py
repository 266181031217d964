"""The jobs of a profile: what each is called, the values it follows from, and what it reads.

Rules take their values from here, so that a job is stale for Snakemake and for `sparkgpt why` by
the same texts. Files are the rules' business; here a job is known by its record, `jobs/<job>.json`.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkgpt.fingerprint import code_digest
from sparkgpt.pipeline.ledger import Ledger
from sparkgpt.pipeline.profiles import MAIN, Profile, flag_text
from sparkgpt.pipeline.values import NO_IMAGE, RULES, data_digests, environment, shell_digests

CHECKS = {"transformers": "check_hf", "mlx": "check_mlx"}


Wildcards = dict[str, str]


@dataclass(frozen=True)
class Job:
    """One job.

    name: unique in the profile; record: path of its record; values: what it follows from, with
    accepted changes taken back; raw: the same as they are now; after: names of the jobs whose
    outputs it reads by content; gated: it is looked at only once `ready` has run.
    """

    rule: str
    wildcards: Wildcards
    name: str
    record: Path
    values: dict[str, str]
    raw: dict[str, str]
    after: tuple[str, ...]
    gated: bool

    @property
    def lines(self) -> list[str]:
        """`name=value` texts: Snakemake compares params as a set, without their names."""
        return [f"{name}={value}" for name, value in self.values.items()]


class Jobs:
    """The jobs of one profile, on the host (`image` none) or in a container of that digest."""

    def __init__(self, profile: Profile, image: str = NO_IMAGE):
        self.profile = profile
        self.image = image
        self.groups = {group.records: group for group in profile.groups.values()}
        self.sources = {source["file"]: source for source in profile.values["sources"].values()}
        self.ledger = Ledger.read(Path(profile.results))
        self._code = functools.cache(code_digest)  # one tree for all jobs, whatever is edited later

    def job(self, rule: str, **wildcards: str) -> Job:
        """The job of a rule, its wildcards as in workflow/rules. KeyError for others."""
        stage, names = RULES[rule]
        name, record = self._named(rule, wildcards)
        raw = {key: self._value(key, rule, stage, wildcards) for key in names}
        values = {key: self.ledger.resolved(name, key, value) for key, value in raw.items()}
        after = tuple(self._named(*other)[0] for other in self._after(rule, wildcards))
        gated = rule == "rulegraph" or ("records" in wildcards and rule != "coordinates")
        return Job(rule, wildcards, name, record, values, raw, after, gated)

    def of(self, group: str) -> list[Job]:
        """The jobs of a runs table, with those of the data, each after the jobs that it reads."""
        return [self.job(rule, **wildcards) for rule, wildcards in self._calls(group)]

    def _calls(self, name: str) -> Iterator[tuple[str, Wildcards]]:
        group, config = self.profile.groups[name], self.profile.values
        records = {"records": group.records}
        for rule in ("fetch", "verify"):
            yield from ((rule, {"raw": raw}) for raw in self.sources)
        yield from ((rule, {}) for rule in ("prepare", "cache", "autotune", "ready"))
        runs = [records | {"run": run} for run in group.runs]
        yield from (("train", run) for run in runs)
        if name == MAIN and config["checks"]:
            yield from (("export", run) for run in runs)
            yield from ((CHECKS[check], run) for check in config["checks"] for run in runs)
        if self.profile.pairs_of(group.records):
            yield "compare", records
        yield "tables", records
        plots = self.profile.plots_of(group.records)
        if "coordinates" in plots:
            yield "coordinates", records
        yield from (("plot", records | {"plot": plot}) for plot in plots)
        yield from (("rulegraph", {}), ("page", records))

    def _named(self, rule: str, wildcards: Wildcards) -> tuple[str, Path]:
        """A job's name and the path of its record."""
        records = wildcards.get("records", self.profile.results)
        name = "-".join([rule, *(wildcards[k] for k in ("raw", "run", "plot") if k in wildcards)])
        folder = "" if records == self.profile.results else f"{Path(records).name}/"
        return folder + name, Path(records, "jobs", f"{name}.json")

    def _value(self, key: str, rule: str, stage: str, wildcards: Wildcards) -> str:
        profile = self.profile
        if key == "code":
            return self._code(stage)
        if key == "env":
            return environment(stage)
        if key == "shell":
            return shell_digests()[rule]
        if key == "image":
            return self.image
        if key == "source":
            return source_text(self.sources[wildcards["raw"]])
        if key == "sources":
            return "; ".join(map(source_text, profile.values["sources"].values()))
        if key == "data":
            return data_digests(profile.results)
        if key == "pairs":
            return " ".join(profile.pairs_of(wildcards["records"]))
        if key == "runs":
            return " ".join(self.groups[wildcards["records"]].runs)
        return {
            "prepare": lambda: flag_text(profile.values["prepare"]),
            "autotune": lambda: profile.autotune_flags,
            "train": lambda: profile.run_config(wildcards["run"]),
            "rulegraph": lambda: shape_text(profile),
        }[rule]()

    def _after(self, rule: str, wildcards: Wildcards) -> Iterator[tuple[str, Wildcards]]:
        """The jobs whose outputs a job reads by content; `ancient` inputs are values instead."""
        raws = [{"raw": raw} for raw in self.sources]
        if rule == "verify":
            yield "fetch", wildcards
        elif rule == "prepare":
            yield from ((other, raw) for raw in raws for other in ("fetch", "verify"))
        elif rule == "cache":
            yield "prepare", {}
        elif rule == "ready":
            yield from (("cache", {}), ("autotune", {}))
        elif rule in ("export", *CHECKS.values()):
            yield "train", wildcards
            if rule != "export":
                yield "export", wildcards
        elif rule in ("compare", "tables", "plot", "page"):
            yield from self._read_by_reports(rule, wildcards)

    def _read_by_reports(self, rule: str, wildcards: Wildcards) -> Iterator[tuple[str, Wildcards]]:
        profile, group = self.profile, self.groups[wildcards["records"]]
        config, records = profile.values, {"records": group.records}
        for run in group.runs:
            yield "train", records | {"run": run}
            if rule in ("tables", "page") and group.name == MAIN:
                yield from ((CHECKS[check], records | {"run": run}) for check in config["checks"])
        if rule != "compare" and profile.pairs_of(group.records):
            yield "compare", records
        if rule == "page":
            plots = profile.plots_of(group.records)
            yield from (("plot", records | {"plot": plot}) for plot in plots)
            yield "rulegraph", {}
        if wildcards.get("plot") == "coordinates":
            yield "coordinates", records


def shape_text(profile: Profile) -> str:
    """The keys that say which rules there are."""
    keys = ("checks", "plots", "compare")
    return "; ".join(f"{key} {' '.join(profile.values[key])}" for key in keys)


def source_text(source: dict) -> str:
    """A source and its pin as flags of `sparkgpt fetch`."""
    return f"{source['name']} {flag_text(source['flags'])}".strip()

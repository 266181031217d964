"""A profile, checked: its configuration, its runs tables, and each run's flags.

Imported by the Snakefile, which every start of Snakemake runs: standard library, YAML and the
light floor of the package only.
"""

import csv
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT
from sparkgpt.flags import parse_train
from sparkgpt.image import RESULTS_SUFFIX
from sparkgpt.pipeline.texts import read_text

CONFIG = Path("workflow", "config")
SCHEMAS = ROOT / "workflow" / "schemas"
SHAPE = (
    "model_layers", "model_dim", "attention_heads", "kv_heads", "head_dim", "intermediate_size",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    "max_position_embeddings",
)  # fmt: skip
MAIN = "runs"  # the group of rows whose exports are checked and whose tables are the profile's


@dataclass(frozen=True)
class Row:
    """One line of a runs table: runs that differ only in their seed."""

    name: str
    seeds: tuple[int, ...]
    flags: str

    @property
    def runs(self) -> list[str]:
        """Run names, one a seed."""
        return [f"{self.name}-s{seed}" for seed in self.seeds]


@dataclass(frozen=True)
class Group:
    """One runs table, `<profile>.<group>.tsv`, and the records folder of its runs."""

    name: str
    table: Path
    records: str
    rows: tuple[Row, ...]

    @property
    def runs(self) -> list[str]:
        return [run for row in self.rows for run in row.runs]


@dataclass(frozen=True)
class Profile:
    """A checked configuration. `values` is the YAML, `groups` its runs tables by name, `results`
    the folder of everything that the profile makes."""

    name: str
    values: Mapping[str, Any]
    groups: Mapping[str, Group]
    results: str

    @cached_property
    def run_flags(self) -> dict[str, str]:
        """Run name -> its training flags as canonical shell text, the seed included."""
        return {
            f"{row.name}-s{seed}": flag_text(
                self.values["train"] | parse_flags(row.flags) | {"seed": seed}
            )
            for group in self.groups.values()
            for row in group.rows
            for seed in row.seeds
        }

    def pairs_of(self, records: str) -> list[str]:
        """The pairs of rows, as A:B, that are compared in a records folder: both in its table."""
        (group,) = (group for group in self.groups.values() if group.records == records)
        rows = {row.name for row in group.rows}
        return [pair for pair in self.values["compare"] if set(pair.split(":")) <= rows]

    def plots_of(self, records: str) -> list[str]:
        """Names of a group's plots; outside the main group, those of the losses."""
        if records == self.results:
            return self.values["plots"]
        return ["loss", *(["matched"] if self.pairs_of(records) else [])]

    def run_config(self, run: str) -> str:
        """What a run's weights follow from: its flags, and how many ranks it has beyond one."""
        return with_ranks(self.values.get("ranks", 1), self.run_flags[run])

    @property
    def autotune_flags(self) -> str:
        """Flags of `sparkgpt autotune`: every attention shape among the runs, one window size, and
        each model whose kernels a GPU has."""
        parsed = [self.parsed(run) for run in self.run_flags]
        shapes = {(m.attention_heads, m.kv_heads, m.head_dim) for m, _ in parsed}
        devices = {t.device for _, t in parsed}
        if len(devices) != 1:
            raise UserError(f"profile {self.name}: its runs name several devices; choose one")
        device = devices.pop()
        words = [f"--device {device}"]
        words += [f"--attention {n},{k},{h}" for n, k, h in sorted(shapes)]
        words.append(f"--tokens-per-batch {max(t.tokens_per_batch for _, t in parsed)}")
        words.append(f"--longest {max(m.max_position_embeddings for m, _ in parsed)}")
        if device != "cpu":
            models = dict.fromkeys(_shape_flags(model) for model, _ in parsed)
            words += [shlex.quote(f"--model={flags}") for flags in models]
        return " ".join(words)

    def parsed(self, run: str) -> tuple[ModelConfig, TrainConfig]:
        """A run's flags as the trainer reads them. UserError on impossible values."""
        try:
            return parse_train(shlex.split(self.run_flags[run]), prog=f"run {run} of {self.name}")
        except UserError as error:
            raise UserError(f"profile {self.name}, run {run}: {error}") from error


def with_ranks(ranks: int, flags: str) -> str:
    """The text of a run's configuration: `ranks=N` before its flags, when there are several."""
    return f"ranks={ranks} {flags}" if ranks > 1 else flags


def split_ranks(config: str) -> tuple[int, str]:
    """(ranks, flags) of a run's configuration."""
    found = re.match(r"ranks=(\d+) ", config)
    return (int(found[1]), config[found.end() :]) if found else (1, config)


def load_profile(config: Mapping[str, Any], contained: bool = False) -> Profile:
    """Check a configuration and read its runs tables. UserError, one line, on any mistake.

    What is made in containers lies apart, so that neither makes the other stale.
    """
    name = config["profile"]
    results = f"results/{name}" + (RESULTS_SUFFIX if contained else "")
    where = str(CONFIG / f"{name}.yaml")
    check_schema(dict(config), "config", where)
    groups = {}
    for table in sorted((ROOT / CONFIG).glob(f"{name}.*.tsv")):
        group = table.name.split(".")[1]
        records = results + ("" if group == MAIN else f"/{group}")
        groups[group] = Group(group, CONFIG / table.name, records, read_rows(table))
    if MAIN not in groups:
        raise UserError(f"profile {name} has no runs table; write {CONFIG / name}.{MAIN}.tsv")
    profile = Profile(name, dict(config), groups, results)
    _check_rows(profile, where)
    return profile


def known_profiles() -> list[str]:
    """Names of the profiles that have a configuration."""
    return sorted(path.stem for path in (ROOT / CONFIG).glob("*.yaml"))


def read_profile(name: str) -> dict[str, Any]:
    """The YAML of a profile. UserError when there is none of that name."""
    if name not in known_profiles():
        raise UserError(f"there is no profile {name!r}; choose from {', '.join(known_profiles())}")
    path = CONFIG / f"{name}.yaml"
    values = read_yaml(ROOT / path)
    if type(values) is not dict:
        raise UserError(f"{path} is no mapping; see workflow/schemas/config.schema.yaml")
    return values


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. UserError when it is damaged."""
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not YAML ({reason}); correct it") from error


def read_rows(table: Path) -> tuple[Row, ...]:
    """The rows of a runs table: TSV with a header; lines that begin with # are comments."""
    lines = [x for x in read_text(table).splitlines() if x and x[0] != "#"]
    rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for row in rows:
        check_schema(row, "runs", f"{CONFIG / table.name}, row {row['row']!r}")
    return tuple(Row(r["row"], tuple(map(int, r["seeds"].split(","))), r["flags"]) for r in rows)


def check_schema(value: object, schema: str, where: str) -> None:
    """UserError with the place and the reason when `value` does not fit `schema`."""
    rules = yaml.safe_load((SCHEMAS / f"{schema}.schema.yaml").read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(rules).iter_errors(value)
    )
    if error:
        path = "".join(f" {part}:" for part in error.absolute_path)
        raise UserError(
            f"{where}:{path} {error.message}; see workflow/schemas/{schema}.schema.yaml"
        )


def parse_flags(text: str) -> dict[str, Any]:
    """`--a 1 --no-b` -> {"a": "1", "no-b": True}: flags of a runs table as a mapping."""
    flags: dict[str, Any] = {}
    name = None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"flags {text!r}: {error}") from error
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = True
        elif name and flags[name] is True:
            flags[name] = word
        else:
            raise UserError(f"flags {text!r}: {word!r} follows no --flag")
    return flags


def flag_text(flags: Mapping[str, Any]) -> str:
    """A mapping as shell text, sorted by name, so that order in a file never matters.

    True gives the bare flag, False its `--no-` form, None nothing.
    """
    words = []
    for name, value in sorted(flags.items()):
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _shape_flags(model: ModelConfig) -> str:
    """The flags that a kernel's shapes follow from."""
    flags = {name.replace("_", "-"): getattr(model, name) for name in SHAPE}
    dense = ",".join(map(str, model.mlp_only_layers))
    return flag_text(flags | ({"mlp-only-layers": dense} if dense else {}))


def _check_rows(profile: Profile, where: str) -> None:
    """UserError when rows repeat, flags are wrong, or a pair names no row."""
    names = [row.name for group in profile.groups.values() for row in group.rows]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"profile {profile.name}: row {name!r} is in its tables twice")
    for run in profile.run_flags:
        profile.parsed(run)
    paired = {pair for group in profile.groups.values() for pair in profile.pairs_of(group.records)}
    for pair in profile.values["compare"]:
        if pair not in paired:
            raise UserError(f"{where}: compare: {pair!r} names a row that the runs table lacks")

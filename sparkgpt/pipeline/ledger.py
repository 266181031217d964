"""`accepted.jsonl`: changes of values that alter no result, who said so, when and why.

One JSON object a line: {"when", "by", "reason", "changes": [{"job", "name", "old", "new"}]}. For
that job, the value `new` then stands for `old`, the one in its record. Lines are only ever added.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sparkgpt.config import FREE
from sparkgpt.errors import UserError
from sparkgpt.files import write_text
from sparkgpt.lock import exclusive
from sparkgpt.pipeline.profiles import parse_flags, split_ranks
from sparkgpt.pipeline.texts import read_text
from sparkgpt.pipeline.values import RULES

LEDGER = "accepted.jsonl"
COVERED = ("code", "env", "image", "shell")
# A run may go on under other values of these, but one that starts anew gets other weights, or the
# same to the last bits only.
TELLING = {
    "max_train_steps", "on_bad_step", "device", "threads", "compile", "attention_backend",
    "triton_attention", "fused_qk_rope", "fused_swiglu", "fused_dispatch", "chunked_head",
    "triton_muon", "autotune_gemm", "autotune",
}  # fmt: skip


@dataclass(frozen=True)
class Ledger:
    """The entries of a ledger, oldest first."""

    path: Path
    entries: tuple[dict, ...]

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """The ledger of a records folder, empty when there is none. UserError, naming the line,
        when it is damaged or takes for equal what `accept` doesn't."""
        path = folder / LEDGER
        lines = read_text(path).splitlines() if path.is_file() else []
        return cls(path, tuple(_entry(line, f"{path} line {n}") for n, line in enumerate(lines, 1)))

    def resolved(self, job: str, name: str, value: str) -> str:
        """The value that `value` was accepted as for a job; itself when it never was."""
        for entry in reversed(self.entries):
            for change in entry["changes"]:
                if (change["job"], change["name"], change["new"]) == (job, name, value):
                    return change["old"]
        return value

    def equals(self, job: str, name: str, value: str) -> list[str]:
        """`value`, and all that was accepted as it for a job."""
        changes = [change for entry in self.entries for change in entry["changes"]]
        new = [c["new"] for c in changes if (c["job"], c["name"], c["old"]) == (job, name, value)]
        return [value, *new]

    def add(self, entry: dict) -> None:
        """Write the ledger, as it is by now, with one more entry; it appears by rename."""
        with exclusive(self.path):
            entries = (*Ledger.read(self.path.parent).entries, entry)
            lines = [json.dumps(item, sort_keys=True) for item in entries]
            write_text(self.path, "\n".join(lines) + "\n")


def is_acceptable(job: str, name: str, old: str, new: str) -> bool:
    """Whether a change of a job's value can be one that alters no result: of what runs it, or of
    training flags that no weight follows from."""
    rule = job.rpartition("/")[2].split("-")[0]
    if rule not in RULES or name not in RULES[rule][1]:
        return False
    return name in COVERED or (rule == "train" and name == "config" and not _telling(old, new))


def _telling(old: str, new: str) -> bool:
    """Whether two texts of training flags differ in one that a result follows from."""
    (were, old), (ranks, new) = split_ranks(old), split_ranks(new)
    if were != ranks:
        return True
    before, after = parse_flags(old), parse_flags(new)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    fields = {name.removeprefix("no-").replace("-", "_") for name in changed}
    return not fields <= FREE - TELLING


def _entry(line: str, where: str) -> dict:
    try:
        entry = json.loads(line)
        texts = [entry[key] for key in ("when", "by", "reason")]
        for change in entry["changes"]:
            texts += [change[key] for key in ("job", "name", "old", "new")]
        if not all(type(text) is str for text in texts):
            raise TypeError("a value that is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is damaged ({error}); restore it") from error
    if not entry["reason"].strip():
        raise UserError(f"{where} gives no reason; restore it, or remove the line")
    for change in entry["changes"]:
        try:
            fits = is_acceptable(change["job"], change["name"], change["old"], change["new"])
        except UserError as error:
            raise UserError(f"{where}: {error}; restore it") from error
        if not fits:
            raise UserError(
                f"{where} accepts a change of {change['name']!r} for {change['job']!r}, which "
                "can't be accepted; remove the line and run the pipeline"
            )
    return entry

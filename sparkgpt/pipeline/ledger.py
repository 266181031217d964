"""`accepted.jsonl`: changes of values that alter no result, who said so, when and why.

One JSON object a line: {"when", "by", "reason", "changes": [{"job", "name", "old", "new"}]}. For
that job, the value `new` then stands for `old`, the one in its record. Lines are only ever added.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_text

LEDGER = "accepted.jsonl"


@dataclass(frozen=True)
class Ledger:
    """The entries of a ledger, oldest first."""

    path: Path
    entries: tuple[dict, ...]

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """The ledger of a records folder, empty when there is none. UserError when damaged."""
        path = folder / LEDGER
        entries = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                for change in entry["changes"]:
                    [change[key] for key in ("job", "name", "old", "new")]
                entries.append(entry)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path} line {number} is damaged ({error}); restore it") from error
        return cls(path, tuple(entries))

    def resolved(self, job: str, name: str, value: str) -> str:
        """The value that `value` was accepted as for a job; itself when it never was."""
        for entry in reversed(self.entries):
            for change in entry["changes"]:
                if (change["job"], change["name"], change["new"]) == (job, name, value):
                    return change["old"]
        return value

    def add(self, entry: dict) -> None:
        """Write the ledger with one more entry; it appears by rename."""
        lines = [json.dumps(item, sort_keys=True) for item in (*self.entries, entry)]
        write_text(self.path, "\n".join(lines) + "\n")

"""What a job was made from and what it made, by value: `jobs/<job>.json`, each rule's last output.

A record is {"schema", "rule", "values": {name: text}, "inputs": {path: sha256}, "outputs":
{path: sha256}, "seconds", "finished"}. Inputs are those read by content; what is large and ordered
by value alone, such as the caches that a run reads, is among the values.
"""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, sha256_file, write_json

SCHEMA = 1
SECTIONS = ("values", "inputs", "outputs")


def read_record(path: Path) -> dict | None:
    """A job's record; None when there is none. UserError when it is damaged."""
    if not path.is_file():
        return None
    record = read_json(path)
    if record.get("schema") != SCHEMA or not all(type(record.get(s)) is dict for s in SECTIONS):
        raise UserError(f"{path} is no job record of schema {SCHEMA}; remove it to run the job")
    return record


def main(argv: list[str]) -> int:
    """Hash a job's files and write its record; called by the rules, after their command."""
    parser = argparse.ArgumentParser(prog="python -m sparkgpt.pipeline.record")
    parser.add_argument("record", type=Path)
    parser.add_argument("--rule", required=True)
    parser.add_argument("--started", type=float, required=True, help="seconds since 1970")
    for section in SECTIONS:
        parser.add_argument(f"--{section}", nargs="*", default=[])
    args = parser.parse_args(argv)
    outputs = [path for path in args.outputs if Path(path) != args.record]
    value = {
        "schema": SCHEMA,
        "rule": args.rule,
        "values": dict(text.split("=", 1) for text in args.values),
        "inputs": {path: sha256_file(path) for path in args.inputs},
        "outputs": {path: sha256_file(path) for path in outputs},
        "seconds": round(time.time() - args.started, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(args.record, value)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a job was made from and what it made, by value: `jobs/<job>.json`, each rule's last output.

A record is {"schema", "rule", "values": {name: text}, "inputs": {path: sha256}, "outputs":
{path: sha256}, "image", "seconds", "finished"}. Inputs are those read by content; what is large and
ordered by value alone, such as the caches that a run reads, is among the values. `image` is the
digest of the container that the job ran in, as it found it there; null on the host.
"""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from sparkgpt.errors import UserError, explain
from sparkgpt.files import read_json, sha256_file, write_json
from sparkgpt.image import check_image, image_digest

SCHEMA = 1
SECTIONS = ("values", "inputs", "outputs")


def read_record(path: Path) -> dict | None:
    """A job's record; None when there is none. UserError when it is damaged."""
    if not path.is_file():
        return None
    record = read_json(path)
    sections = [record.get(name) for name in SECTIONS]
    texts = all(type(s) is dict and all(type(x) is str for x in s.values()) for s in sections)
    told = type(record.get("rule")) is str and type(record.get("seconds")) in (int, float)
    if record.get("schema") != SCHEMA or not (texts and told):
        raise UserError(f"{path} is no job record of schema {SCHEMA}; remove it to run the job")
    return record


def main(argv: list[str]) -> int:
    """Hash a job's files and write its record; called by the rules, after their command.

    UserError when an input was written since the job started.
    """
    parser = argparse.ArgumentParser(prog="python -m sparkgpt.pipeline.record")
    parser.add_argument("record", type=Path)
    parser.add_argument("--started", type=float, required=True, help="seconds since 1970")
    for section in SECTIONS:
        parser.add_argument(f"--{section}", nargs="*", default=[])
    args = parser.parse_args(argv)
    check_image()
    for path in args.inputs:
        if Path(path).stat().st_mtime > args.started:
            raise UserError(
                f"{path} was written while the job that reads it ran, so that there is no telling "
                "what it read; run the pipeline again",
                exit_code=1,
            )
    outputs = [path for path in args.outputs if Path(path) != args.record]
    value = {
        "schema": SCHEMA,
        "rule": args.record.name.split("-")[0].removesuffix(".json"),
        "values": dict(text.split("=", 1) for text in args.values),
        "inputs": {path: sha256_file(path) for path in args.inputs},
        "outputs": {path: sha256_file(path) for path in outputs},
        "image": image_digest(),
        "seconds": round(time.time() - args.started, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(args.record, value)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError) as error:
        message, code = explain(error)
        print(f"sparkgpt: error: {message}", file=sys.stderr)
        sys.exit(code)

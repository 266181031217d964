"""The command: prints a diagnosis as lines or as JSON. Imports torch once the flags are read."""

import json
import os

from sparkgpt.doctor.diagnosis import as_json, diagnose, gather
from sparkgpt.doctor.findings import render
from sparkgpt.doctor.profiles import DEFAULT
from sparkgpt.flags import Parser


def main(argv: list[str]) -> int:
    """Print the diagnosis. Returns 0 when the profile asked for, or the default one, fits."""
    parser = Parser(
        prog="sparkgpt doctor",
        description="What this machine can run, why not, and what to do. Under torchrun, every "
        "rank reports and the network between them is measured.",
    )
    parser.add_argument("--profile", default="", help=f"judge this one (default: {DEFAULT})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from sparkgpt.doctor.ranks import run

        return run(args.profile, args.json)
    facts = gather()
    diagnosis = diagnose(facts, args.profile)
    if args.json:
        print(json.dumps(as_json(facts, diagnosis)))
    else:
        print(render(diagnosis.findings))
    return 0 if diagnosis.fits else 1

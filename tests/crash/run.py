"""Kill runs at random, resume them, and compare their ends with uninterrupted runs.

    python tests/crash/run.py [--kills N] [--seed S]

Real processes, SIGKILL from outside. Exit code 0 when every run ended in the bytes of the
uninterrupted one, and each kill fell into the phase that it was aimed at; 1 otherwise.
"""

import argparse
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, for the helpers

from attempt import Fault
from plan import AIMS, make_targets
from session import COLUMNS, Session

LOG_LINES = 20  # of the last attempt, shown when something went wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=24, metavar="N", help="default: 24")
    parser.add_argument("--seed", type=int, metavar="S", help="default: a random one")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"{args.kills} kills, seed {seed}", flush=True)
    rng = random.Random(seed)
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="sparkgpt-crash-"))
    session = Session(folder, args.kills, rng)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started
    keep = False
    try:
        session.carry_out(make_targets(args.kills, rng))
    except Fault as fault:
        keep = True
        show(session)
        print(f"crash: seed {seed}, run {session.running}: {fault}; kept in {folder}")
        return 1
    finally:
        if not keep:
            shutil.rmtree(folder)
    print(table(session.places))
    print(
        f"{sum(session.places.values())} kills, {session.attempts} attempts, {session.runs} runs: "
        f"all end in the bytes of uninterrupted ones ({time.monotonic() - began:.0f} s)"
    )
    return 0


def show(session: Session) -> None:
    """What is known when something went wrong."""
    print(table(session.places))
    if session.log:
        lines = session.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"the end of {session.log}:", *lines, sep="\n  ")


def table(places: Counter) -> str:
    """Kills by phase and variant, where they really fell."""
    names = [name for name in (*AIMS, "between") if name != "random"]
    lines = ["killed in".ljust(14) + "".join(column.rjust(10) for column in COLUMNS)]
    for name in names:
        counts = (places[name, column] or "-" for column in COLUMNS)
        lines.append(name.ljust(14) + "".join(str(count).rjust(10) for count in counts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

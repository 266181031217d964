"""What both programs of random kills share: their flags, their seed, and how they end."""

import argparse
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attempt import Fault


def carry_out(
    about: str,
    kills: int,
    make_session: Callable[[Path, int, random.Random], Any],
    make_targets: Callable[[int, random.Random], list],
) -> int:
    """Read --kills (default `kills`) and --seed, and run a session. Returns the exit code: 1 after
    a fault, whose folder is kept.

    A session has `carry_out(targets)`, which may raise Fault; `table()`; `end_of_log()`, lines for
    a fault; `place`, where it is; `sum_up()`, one line for a good end; and `close()`.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--kills", type=int, default=kills, metavar="N", help=f"default: {kills}")
    parser.add_argument("--seed", type=int, metavar="S", help="default: a random one")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"{args.kills} kills, seed {seed}", flush=True)
    rng = random.Random(seed)
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="sparkgpt-crash-"))
    session = make_session(folder, args.kills, rng)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started
    keep = False
    try:
        session.carry_out(make_targets(args.kills, rng))
    except Fault as fault:
        keep = True
        print(session.table(), *session.end_of_log(), sep="\n")
        print(f"crash: seed {seed}, {session.place}: {fault}; kept in {folder}")
        return 1
    finally:
        session.close()
        if not keep:
            shutil.rmtree(folder)
    print(session.table())
    print(f"{session.sum_up()} ({time.monotonic() - began:.0f} s)")
    return 0


def draw_table(places: Counter, rows: Iterable[str], columns: Iterable[str]) -> str:
    """Kills by (row, column), where they really fell."""
    lines = ["killed in".ljust(18) + "".join(column.rjust(11) for column in columns)]
    for row in rows:
        counts = (places[row, column] or "-" for column in columns)
        lines.append(row.ljust(18) + "".join(str(count).rjust(11) for count in counts))
    return "\n".join(lines)

"""Kill runs at random, resume them, and compare their ends with uninterrupted runs.

    python tests/crash/run.py [--kills N] [--seed S]

Real processes, SIGKILL from outside. Exit code 0 when every run ended in the bytes of the
uninterrupted one, and each kill fell into the phase that it was aimed at; 1 otherwise.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, for the helpers

from command import carry_out
from plan import make_targets
from session import Session

if __name__ == "__main__":
    sys.exit(carry_out(__doc__.split("\n")[0], 24, Session, make_targets))

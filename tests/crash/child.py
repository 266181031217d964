"""One rank of a run under test: `sparkgpt.train` itself, telling a FIFO which phase it is in.

Whoever kills this process knows from the FIFO where it died. A phase too short to be hit by chance
may be held at its start until the kill comes. What the run computes is left alone.
"""

import functools
import importlib
import json
import os
import re
import runpy
import time
from collections.abc import Callable
from pathlib import Path

# Functions that make up a phase. Exports and renames are told apart by what they write, below.
PHASES = {
    "sparkgpt.train.run:_resume": "resume",
    "sparkgpt.train.loop:Trainer.one_step": "step",
    "sparkgpt.train.loop:Trainer.validate": "validation",
    "sparkgpt.train.loop:save_step": "save",
    "sparkgpt.train.loop:prune": "prune",
    "sparkgpt.train.finish:save_final": "record",
    "sparkgpt.train.finish:write_json": "record",
    "sparkgpt.train.run:publish": "publish",
}
CHECKPOINT = re.compile(r"step\d+")
HELD_SECONDS = 60.0


class Teller:
    """Writes a JSON line to the FIFO when the process starts, the attempt begins, a phase begins
    or ends. `held` names the phase, the rank and the first step that wait for the kill; or none."""

    def __init__(self, fifo: str, held: dict):
        self.fifo = os.open(fifo, os.O_WRONLY)
        self.held = held
        self.rank = int(os.environ.get("RANK", "0"))
        self.state = None  # the trainer's RunState, once the attempt has begun

    def tell(self, event: str, phase: str = "") -> None:
        line = {"event": event, "phase": phase, "step": self.step, "rank": self.rank,
                "pid": os.getpid(), "at": time.monotonic()}  # fmt: skip
        os.write(self.fifo, (json.dumps(line) + "\n").encode())  # below PIPE_BUF: never torn

    def call(self, phase: str, function: Callable, *args, **kwargs):
        """What `function` returns, told as a phase; the one to be held waits for the kill."""
        self.tell("enter", phase)
        try:
            if self.is_held(phase):
                time.sleep(HELD_SECONDS)
            return function(*args, **kwargs)
        finally:
            self.tell("exit", phase)

    def is_held(self, phase: str) -> bool:
        wanted = self.held.get("phase") == phase and self.held["rank"] == self.rank
        return wanted and self.step >= self.held["step"]

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.state.step if self.state else 0


def watch(teller: Teller) -> None:
    """Put a teller around everything in PHASES, exports, and the renames of checkpoints."""

    def begin_attempt(begin, state, *args):
        begin(state, *args)
        teller.state = state
        teller.tell("begin")

    def write_hf(write, out, *args, **kwargs):
        phase = "export" if Path(out).name == "hf" else "twin"
        teller.call(phase, write, out, *args, **kwargs)

    nothing = lambda: None

    def replace(rename, source, target, **kwargs):
        checkpoint = CHECKPOINT.fullmatch(Path(target).name)
        if checkpoint:
            teller.call("before rename", nothing)
        rename(source, target, **kwargs)
        if checkpoint:
            teller.call("after rename", nothing)

    for place, phase in PHASES.items():
        wrap(place, functools.partial(teller.call, phase))
    wrap("sparkgpt.train.state:RunState.begin_attempt", begin_attempt)
    wrap("sparkgpt.train.finish:write_hf", write_hf)
    wrap("os:replace", replace)


def wrap(place: str, around: Callable) -> None:
    """Replace `module:name` by a function that gives `around` the original and its arguments."""
    module, _, name = place.partition(":")
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, last)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return around(original, *args, **kwargs)

    setattr(owner, last, wrapped)


if __name__ == "__main__":
    the_teller = Teller(os.environ["CRASH_FIFO"], json.loads(os.environ["CRASH_HELD"]))
    the_teller.tell("start")
    watch(the_teller)
    runpy.run_module("sparkgpt.train", run_name="__main__", alter_sys=True)

"""How far a run has come: everything in a checkpoint that isn't a tensor."""

import dataclasses
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sparkgpt.guard import Guard
from sparkgpt.metrics import Throughput

RATES = ("second_half", "interval", "total")


@dataclass
class RunState:
    """Counters of a run, kept across its attempts. No random state: training draws no numbers."""

    step: int = 0  # completed steps
    real_tokens: int = 0
    initial_loss: float | None = None
    train_loss: float | None = None  # of the last logged step, nats per target
    train_seconds: float = 0.0  # in training steps alone, over all attempts
    half: int = 0  # the step after which the second half began
    second_half: Throughput = field(default_factory=Throughput)
    interval: Throughput = field(default_factory=Throughput)  # since the last logged step
    total: Throughput = field(default_factory=Throughput)
    validations: list[list[float]] = field(default_factory=list)  # [step, nats per target]
    guard: Guard = field(default_factory=Guard)
    attempts: list[dict] = field(default_factory=list)

    def begin_attempt(self, inexact: dict[str, object]) -> None:
        """Open the record of this process's attempt. `inexact` is what may differ from the last
        attempt's although it can change the last bits: said when it does."""
        before = self.attempts[-1]["inexact"] if self.attempts else inexact
        for name in (n for n, value in inexact.items() if before.get(n) != value):
            print(f"{name} was {before.get(name)}, is {inexact[name]}: allowed, but not exact; "
                  "recorded", file=sys.stderr)  # fmt: skip
        self.attempts.append(
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "from_step": self.step,
                "to_step": self.step,
                "seconds": 0.0,
                "end": "running",
                "inexact": inexact,
                "saves": 0,
                "save_seconds": 0.0,
                "save_bytes": 0,
            }
        )
        self.clock = time.monotonic()

    def aim(self, steps: int) -> None:
        """Rates of the second half are of `steps` steps: of another number, they begin anew."""
        if self.half != steps // 2:
            self.half, self.second_half = steps // 2, Throughput()

    def mark_attempt(self, end: str) -> None:
        """Bring this attempt's record up to date; `end` says how it stands: saved, complete..."""
        seconds = round(time.monotonic() - self.clock, 3)
        self.attempts[-1] |= {"to_step": self.step, "seconds": seconds, "end": end}

    def book_save(self, seconds: float, size: int) -> None:
        """Add the cost of one checkpoint with its twin to this attempt's record; size in bytes."""
        attempt = self.attempts[-1]
        attempt["saves"] += 1
        attempt["save_seconds"] = round(attempt["save_seconds"] + seconds, 3)
        attempt["save_bytes"] += size

    @property
    def exact(self) -> bool:
        """Whether all attempts agree in what can change the last bits."""
        return all(a["inexact"] == self.attempts[0]["inexact"] for a in self.attempts)

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {name: vars(getattr(self, name)) for name in RATES}

    @classmethod
    def from_json(cls, values: dict) -> "RunState":
        state = cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
        for name in RATES:
            throughput = Throughput()
            vars(throughput).update(values[name])
            setattr(state, name, throughput)
        state.guard = Guard(**values["guard"])
        return state

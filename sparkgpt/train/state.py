"""How far a run has come: everything in a checkpoint that isn't a tensor."""

import dataclasses
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sparkgpt.metrics import Throughput


@dataclass
class RunState:
    """Counters of a run, kept across its attempts. No random state: training draws no numbers."""

    step: int = 0  # completed steps
    real_tokens: int = 0
    initial_loss: float | None = None
    train_loss: float | None = None  # of the last logged step, nats per target
    train_seconds: float = 0.0  # in training steps alone, over all attempts
    second_half: Throughput = field(default_factory=Throughput)
    total: Throughput = field(default_factory=Throughput)
    validations: list[list[float]] = field(default_factory=list)  # [step, nats per target]
    attempts: list[dict] = field(default_factory=list)

    def begin_attempt(self) -> None:
        """Open the record of this process's attempt."""
        self.attempts.append(
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "from_step": self.step,
                "to_step": self.step,
                "seconds": 0.0,
                "end": "running",
            }
        )
        self.clock = time.monotonic()

    def mark_attempt(self, end: str) -> None:
        """Bring this attempt's record up to date; `end` says how it stands: saved, complete..."""
        seconds = round(time.monotonic() - self.clock, 3)
        self.attempts[-1] |= {"to_step": self.step, "seconds": seconds, "end": end}

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {
            "second_half": vars(self.second_half),
            "total": vars(self.total),
        }

    @classmethod
    def from_json(cls, values: dict) -> "RunState":
        state = cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
        for name in ("second_half", "total"):
            throughput = Throughput()
            vars(throughput).update(values[name])
            setattr(state, name, throughput)
        return state

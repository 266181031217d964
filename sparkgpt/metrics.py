"""What a run writes down while it goes on: metrics.jsonl, clocks, and optionally wandb."""

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from sparkgpt.config import TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.files import naming, write_text

WANDB_FINISH_SECONDS = 60.0


class TrainingClock:
    """Seconds spent in training steps alone: validation and saves are outside its intervals."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.started: float | None = None

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> float:
        """End the interval that `start` began; its length in seconds."""
        assert self.started is not None
        interval = time.perf_counter() - self.started
        self.seconds += interval
        self.started = None
        return interval


class Throughput:
    """Rates over an interval of steps: positions, real tokens and FLOPs per training second."""

    def __init__(self) -> None:
        self.seconds = self.flops = 0.0
        self.window_tokens = self.real_tokens = 0

    def add(self, seconds: float, window_tokens: int, real_tokens: int, flops: float) -> None:
        self.seconds += seconds
        self.window_tokens += window_tokens
        self.real_tokens += real_tokens
        self.flops += flops

    def rates(self) -> dict[str, float]:
        """Window and real tokens/s, TFLOP/s, and utilisation = real / window."""
        seconds = max(self.seconds, 1e-9)
        return {
            "window_tokens_per_second": self.window_tokens / seconds,
            "real_tokens_per_second": self.real_tokens / seconds,
            "tflops_per_second": self.flops / seconds / 1e12,
            "utilization": self.real_tokens / max(self.window_tokens, 1),
        }


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each step and validation exactly once."""

    def __init__(self, path: Path, wandb: "WandbRun | None" = None):
        self.path, self.wandb = path, wandb
        self.file = open(path, "a", encoding="utf-8")

    def write(self, line: dict[str, object]) -> None:
        """Append a line of finite numbers; ValueError for others, UserError on a full disk."""
        with naming(self.path):
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log(line)

    def sync(self) -> None:
        """Make what was written durable, before a checkpoint or a record says that it was."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()
        with naming(self.path):  # closing writes what a full disk did not take before
            self.sync()
            self.file.close()


def read_metrics(path: Path) -> list[dict]:
    """The complete lines of a metrics file; a torn last line (a crash in mid-write) is left out.

    UserError naming a line that is damaged.
    """
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            lines.append(json.loads(line))
            int(lines[-1]["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} line {number} is damaged ({error}); restore it, or remove the line"
            ) from error
    return lines


def cut_metrics(path: Path, step: int) -> None:
    """Drop what a crashed attempt logged past `step`, so that the resumed run logs it once."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


class WandbRun:
    """A Weights & Biases run (offline with WANDB_MODE=offline); never holds the trainer up."""

    def __init__(self, train: TrainConfig, values: dict[str, object], folder: Path):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--wandb: the package wandb is not installed; pip install it"
            ) from error
        try:
            self.run = self._init(wandb, train, values, folder)
        except wandb.errors.Error as error:
            raise UserError(
                f"--wandb: {' '.join(str(error).split())}; run `wandb login`, "
                "or set WANDB_MODE=offline",
                exit_code=1,
            ) from error

    @staticmethod
    def _init(wandb, train: TrainConfig, values: dict[str, object], folder: Path):
        return wandb.init(
            project=train.wandb_project,
            entity=train.wandb_entity or None,
            name=train.wandb_run_name or train.run_name,
            tags=_tags(train.wandb_tags.split(",")),
            config=values,
            dir=str(folder),
        )

    def log(self, line: dict[str, object]) -> None:
        numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
        self.run.log(numbers, step=line["step"])

    def finish(self) -> None:
        """Upload what is left, for at most WANDB_FINISH_SECONDS: a dead network mustn't hang us."""
        thread = threading.Thread(target=self.run.finish, daemon=True)
        thread.start()
        thread.join(WANDB_FINISH_SECONDS)


def _tags(parts: Iterable[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]

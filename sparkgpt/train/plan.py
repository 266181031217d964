"""What a run will do, before it does it: data, steps, and the fingerprint that guards both."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from sparkgpt.config import FREE, ModelConfig, TrainConfig
from sparkgpt.data.cache import ByteCache, open_documents
from sparkgpt.data.stream import (
    Window,
    WindowStream,
    check_lengths,
    empty_window,
    validation_windows,
)
from sparkgpt.data.verification import Verification
from sparkgpt.distributed import Ranks, gather_objects
from sparkgpt.errors import UserError
from sparkgpt.fingerprint import code_digest
from sparkgpt.fingerprint import fingerprint as digest_of

MOST_EPOCHS = 10_000


@dataclass(frozen=True)
class Plan:
    """Data and steps of a run. A step covers `windows_per_step` windows = ranks x accumulate."""

    stream: WindowStream
    val_windows: list[Window]
    windows_per_step: int
    windows: int  # windows that the token target asks for; later ones are empty
    schedule_steps: int  # length of the learning-rate schedule
    steps: int  # where this call stops
    val_steps: frozenset[int]  # completed steps after which to validate
    data: dict
    fingerprint: dict
    verification: Verification  # of the caches; nothing may be saved before it ends well

    def await_verification(self, ranks: Ranks) -> None:
        """Return once the caches of every rank are known to be what their manifests say; all ranks
        call it. UserError on all of them when one's is something else."""
        failures = gather_objects(self.verification.failure(), ranks)
        if any(failures):
            raise UserError(next(filter(None, failures)))

    @property
    def run(self) -> str:
        """Hex sha256 of the fingerprint: every checkpoint carries it."""
        return digest_of(self.fingerprint)

    def step_windows(self, step: int, rank: int, world: int) -> list[Window]:
        """This rank's windows of zero-based `step`: round-robin, padded with empty ones."""
        first = step * self.windows_per_step
        return [self._window(i) for i in range(first + rank, first + self.windows_per_step, world)]

    def step_real_tokens(self, step: int) -> int:
        """Real targets of the global batch, known to every rank without its windows."""
        first = step * self.windows_per_step
        last = min(first + self.windows_per_step, self.windows)
        return sum(self.stream.real_tokens(i) for i in range(first, last))

    def step_documents(self, step: int) -> list[int]:
        """Places in the training file of the global batch's documents."""
        first = step * self.windows_per_step
        last = min(first + self.windows_per_step, self.windows)
        return [n for i in range(first, last) for n in self.stream.documents(i)]

    def step_doc_lengths(self, step: int) -> list[int]:
        """Positions of each document of the global batch."""
        first = step * self.windows_per_step
        last = min(first + self.windows_per_step, self.windows)
        return [n for i in range(first, last) for n in self.stream.doc_lengths(i)]

    def _window(self, index: int) -> Window:
        if index < self.windows:
            return self.stream.window(index)
        return empty_window(self.stream.window_size)


def make_plan(model: ModelConfig, train: TrainConfig, world: int, keep: Path | None = None) -> Plan:
    """Open the data and lay out the run; plans of large corpora are kept in the folder `keep`.

    UserError when a document or a limit doesn't fit. Whether the bytes are those of the digest
    that the run is known by, `Plan.verification` finds out meanwhile.
    """
    limits = {
        "--tokens-per-batch": train.tokens_per_batch,
        "--max-position-embeddings": model.max_position_embeddings,
    }
    cache = open_documents(train.train_path)
    check_lengths(cache, limits)
    _check_epochs(cache, train)
    stream = WindowStream(
        cache,
        window=train.tokens_per_batch,
        buffer=train.pack_buffer,
        seed=train.order_seed,
        keep=keep,
    )
    windows = stream.windows_for(train.target_tokens)
    windows_per_step = world * train.accumulate
    target_steps = math.ceil(windows / windows_per_step)
    schedule_steps = train.lr_schedule_steps or target_steps
    steps = min(target_steps, train.max_train_steps or target_steps)
    val_cache = open_documents(train.val_path) if train.val_path else None
    val_windows = _validation(val_cache, train, limits)
    data = {
        "train": _describe(cache),
        "val": _describe(val_cache) if val_cache else None,
        "stream": stream.digest,
        "val_tokens": sum(window.real_tokens for window in val_windows),
    }
    return Plan(
        stream,
        val_windows,
        windows_per_step,
        windows,
        schedule_steps,
        steps,
        validation_steps(train, schedule_steps, steps) if val_windows else frozenset(),
        data,
        fingerprint(model, train, data, world, schedule_steps),
        Verification([cache, val_cache] if val_cache else [cache]),
    )


def validation_steps(train: TrainConfig, schedule_steps: int, steps: int) -> frozenset[int]:
    """Completed steps after which to validate: every share of the *schedule*, and the last step."""
    if train.val_interval_steps:
        marks = range(train.val_interval_steps, steps + 1, train.val_interval_steps)
    elif train.val_interval_frac:
        # Step s is a mark when a multiple of the interval lies in (s - 1, s].
        passed = lambda step: math.floor(step / (schedule_steps * train.val_interval_frac) + 1e-9)
        marks = [step for step in range(1, steps + 1) if passed(step) > passed(step - 1)]
    else:
        marks = []
    return frozenset(mark for mark in marks if 1 <= mark <= steps) | {steps}


def fingerprint(
    model: ModelConfig, train: TrainConfig, data: dict, world: int, schedule_steps: int
) -> dict:
    """Every value that the weights of a run follow from; equal fingerprints, equal runs."""
    values = dataclasses.asdict(model)
    values |= {k: v for k, v in dataclasses.asdict(train).items() if k not in FREE}
    values |= {"data_seed": train.order_seed, "world_size": world}
    values |= {"schedule_steps": schedule_steps, "code": train.code_as or code_digest("train")}
    values |= {"train_digest": data["train"]["digest"], "stream_digest": data["stream"]}
    values["val_digest"] = data["val"]["digest"] if data["val"] else None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _check_epochs(cache: ByteCache, train: TrainConfig) -> None:
    """Each epoch is planned on its own: absurdly many would look like a hang."""
    epochs = train.target_tokens / (len(cache) + int(cache.offsets[-1]))
    if epochs > MOST_EPOCHS:
        raise UserError(
            f"--target-tokens {train.target_tokens:.6g} means {epochs:,.0f} epochs of "
            f"{train.train_path}, more than {MOST_EPOCHS:,}; lower it, or bring more documents"
        )


def _validation(cache: ByteCache | None, train: TrainConfig, limits: dict) -> list[Window]:
    if cache is None:
        return []
    check_lengths(cache, limits)
    return validation_windows(cache, train.tokens_per_batch, train.val_tokens)


def _describe(cache: ByteCache) -> dict:
    return {"digest": cache.digest, "documents": len(cache), "bytes": int(cache.offsets[-1])}

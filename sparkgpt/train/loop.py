"""The loop over steps: train, log, validate, save, and stop when asked to."""

import dataclasses
import math
import sys
import time
from pathlib import Path

from sparkgpt.checkpoint import prune, save_step
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.data.stream import Window, prefetch
from sparkgpt.distributed import Ranks, gather_objects, synchronize
from sparkgpt.errors import UserError
from sparkgpt.evaluate import evaluate
from sparkgpt.loss import router_summary
from sparkgpt.metrics import MetricsFile, Throughput, TrainingClock, WandbRun
from sparkgpt.model.cost import step_flops
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.optim.schedule import lr_factor
from sparkgpt.progress import progress
from sparkgpt.train.build import build_loss
from sparkgpt.train.finish import write_hf_twin
from sparkgpt.train.plan import Plan
from sparkgpt.train.signals import StopRequest
from sparkgpt.train.state import RunState
from sparkgpt.train.step import StepResult, train_step

PREFETCH = 2  # windows built ahead of the step, in a thread


class Trainer:
    """The loop over steps, with its logging, validation and saves."""

    def __init__(
        self,
        model_config: ModelConfig,
        train: TrainConfig,
        plan: Plan,
        ranks: Ranks,
        folder: Path,
        model: Transformer,
        optimizer: HybridOptimizer,
        state: RunState,
        saved: set[int],
    ):
        """`saved`: steps of the checkpoints that are known to be valid on every rank."""
        self.model_config, self.train, self.plan = model_config, train, plan
        self.ranks, self.folder = ranks, folder
        self.model, self.optimizer, self.state, self.saved = model, optimizer, state, saved
        self.loss_of = build_loss(train, ranks)
        state.aim(plan.steps)
        self.clock = TrainingClock(state.train_seconds)
        wandb = None
        if train.wandb and ranks.is_main:
            wandb = WandbRun(train, dataclasses.asdict(train), folder)
        self.metrics = MetricsFile(folder / "metrics.jsonl", wandb) if ranks.is_main else None

    def loop(self) -> bool:
        """Step to the plan's end; False when a signal asked to stop before it."""
        plan, state, ranks = self.plan, self.state, self.ranks
        request = StopRequest()
        batches = prefetch(
            (plan.step_windows(s, ranks.rank, ranks.world) for s in range(state.step, plan.steps)),
            PREFETCH,
        )
        try:
            with progress("training, steps", plan.steps) as bar:
                bar.advance(state.step)
                self.clock.start()
                for windows in batches:
                    stopping = self.one_step(windows, bool(request))
                    if state.step in plan.val_steps:
                        self.validate()
                    bar.advance(1, self.note())
                    if stopping and state.step < plan.steps:
                        return self.stop(request.name or "another rank's signal")
                    if self.is_save_step():
                        self.save("saved")
                    self.clock.start()
        finally:
            batches.close()
            request.restore()
            if self.metrics:
                self.metrics.close()
        return True

    def one_step(self, windows: list[Window], stop_wanted: bool) -> bool:
        """Train on one global batch; whether any rank wants to stop."""
        train, plan, state, ranks = self.train, self.plan, self.state, self.ranks
        factor = lr_factor(
            state.step, plan.schedule_steps, train.warmup_frac, train.lr_decay_factor
        )
        real_total = plan.step_real_tokens(state.step)
        on_device = [window.to(ranks.device) for window in windows]
        result = train_step(
            self.model, self.loss_of, self.optimizer, on_device, real_total, factor, train, ranks,
            stop_wanted,
        )  # fmt: skip
        state.step += 1
        log = state.step % train.log_every == 0 or state.step in (1, plan.steps)
        stopping = bool(result.stops)
        if log or stopping or self.is_boundary():
            synchronize(ranks.device)  # so that the clock stops at a true end
        self._count(real_total)
        if result.bad:
            self._leave_out(result.bad)
        else:
            state.guard.good()
            state.real_tokens += real_total
            if log:
                self._log(result, real_total, factor)
        return stopping

    def _leave_out(self, reason: str) -> None:
        """Write down that a step changed nothing. UserError when the run must not go on."""
        step, documents = self.state.step, self.plan.step_documents(self.state.step - 1)
        if self.metrics:
            self.metrics.write(
                {"kind": "skip", "step": step, "reason": reason, "documents": documents}
            )
            print(f"step {step} is left out: {reason}", file=sys.stderr)
        # This step's forward pass ran on the weights of the step before, which may be to blame.
        good = max((s for s in self.saved if s < step - self.state.guard.in_a_row - 1), default=0)
        self.state.guard.bad(step, reason, documents, self.train.on_bad_step, good)

    def is_boundary(self) -> bool:
        """Whether other work follows this step, or the second half of the rates begins after it."""
        step = self.state.step
        return step in self.plan.val_steps or self.is_save_step() or step == self.state.half

    def _count(self, real_total: int) -> None:
        """Close this step's clock interval and book what it computed."""
        state, plan = self.state, self.plan
        seconds = self.clock.stop()
        self.clock.start()
        state.train_seconds = self.clock.seconds
        flops = step_flops(self.model_config, plan.step_doc_lengths(state.step - 1))
        booked = (seconds, plan.windows_per_step * self.train.tokens_per_batch, real_total, flops)
        state.interval.add(*booked)
        state.total.add(*booked)
        if state.step > state.half:
            state.second_half.add(*booked)

    def _log(self, result: StepResult, real_total: int, factor: float) -> None:
        state, train = self.state, self.train
        state.train_loss = result.loss
        if state.step == 1:
            state.initial_loss = result.loss
        if not self.metrics:
            return
        line = {"kind": "train", "step": state.step, "train/loss": result.loss,
                "real_tokens": state.real_tokens, "lr/factor": factor,
                "lr/adamw": train.adamw_lr * factor}  # fmt: skip
        if train.optimizer == "muon":
            line["lr/muon"] = train.muon_lr * factor
        if result.router is not None:
            line["train/aux_loss"] = result.aux_loss.item()
            line |= router_summary(result.router, real_total)
        line |= state.interval.rates() | {"seconds": round(state.train_seconds, 3)}
        self.metrics.write(line)
        state.interval = Throughput()

    def validate(self) -> None:
        """Held-out loss over this rank's share of the windows, summed over ranks; logged."""
        self.clock.stop()
        ranks, state = self.ranks, self.state
        mine = self.plan.val_windows[ranks.rank :: ranks.world]
        parts = gather_objects(evaluate(self.model, mine)["nats_sum"] if mine else 0.0, ranks)
        nats = sum(parts) / self.plan.data["val_tokens"]
        if not math.isfinite(nats):
            raise UserError(
                f"the held-out loss is {nats} at step {state.step}; lower --muon-lr or --adamw-lr "
                "under another --run-name",
                exit_code=1,
            )
        state.validations.append([state.step, nats])
        if self.metrics:
            bits = nats / math.log(2)
            self.metrics.write({"kind": "val", "step": state.step, "val/loss": nats,
                                "val/bpb": bits, "real_tokens": state.real_tokens,
                                "seconds": round(state.train_seconds, 3)})  # fmt: skip
        self.clock.start()

    def is_save_step(self) -> bool:
        """Every --save-every steps, and after the last, from where a longer run may go on."""
        step, every = self.state.step, self.train.save_every
        return every > 0 and (step % every == 0 or step == self.plan.steps)

    def save(self, end: str) -> None:
        """Write a resumable checkpoint of this rank and, on rank 0, its Hugging Face twin; older
        ones go once every rank has written its own, with the same weights."""
        self.plan.await_verification(self.ranks)
        state, folder, started = self.state, self.folder, time.monotonic()
        state.mark_attempt(end)
        if self.metrics:
            self.metrics.sync()
        written = []
        if self.ranks.is_main and self.train.hf_export:  # first: no checkpoint is without its twin
            written.append(write_hf_twin(folder, state.step, self.model))
        digest = save_step(
            folder, state.step, self.plan.run, self.model, self.optimizer, state.to_json()
        )
        written.append(folder / f"step{state.step}")
        self.check_alike(gather_objects(digest, self.ranks))
        self.saved.add(state.step)
        prune(folder, self.train.keep_last, self.saved)
        size = sum(file.stat().st_size for path in written for file in path.iterdir())
        state.book_save(time.monotonic() - started, size)

    def check_alike(self, digests: list[str]) -> None:
        """UserError when ranks hold different weights: their sums went apart, or a memory erred."""
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise UserError(
                    f"ranks 0 and {rank} hold different weights after step {self.state.step}; "
                    "start again with --resume, which goes back to the last step that they share; "
                    "if it comes again, check both machines",
                    exit_code=1,
                )

    def stop(self, reason: str) -> bool:
        self.save(reason)
        print(f"stopped by {reason} after step {self.state.step}; rerun with --resume to go on",
              file=sys.stderr)  # fmt: skip
        return False

    def note(self) -> str:
        """What the progress line shows: losses and speed."""
        state, parts = self.state, []
        if state.train_loss is not None:
            parts.append(f"loss {state.train_loss:.3f}")
        if state.validations:
            parts.append(f"val {state.validations[-1][1]:.3f}")
        parts.append(f"{state.total.rates()['window_tokens_per_second']:,.0f} tok/s")
        return ", ".join(parts)

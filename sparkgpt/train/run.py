"""One run from start, or from its newest checkpoint, to its record."""

import dataclasses
import sys
from pathlib import Path

import torch

from sparkgpt.checkpoint import (
    check_fingerprint,
    differences,
    load_step,
    remove_steps,
    valid_steps,
)
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.devices import device_for
from sparkgpt.distributed import Ranks, choose_device, gather_objects, on_main, start, stop
from sparkgpt.errors import UserError
from sparkgpt.files import (
    make_directory,
    read_section,
    remove_leftovers,
    sha256_file,
    write_json,
)
from sparkgpt.lock import folder_lock
from sparkgpt.metrics import cut_metrics
from sparkgpt.model.cost import parameter_counts
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.provenance import describe
from sparkgpt.train.build import build_model, inexact_values
from sparkgpt.train.finish import adopt, finish, publish, show_other_writer
from sparkgpt.train.loop import Trainer
from sparkgpt.train.plan import Plan, make_plan
from sparkgpt.train.signals import EXIT_STOPPED
from sparkgpt.train.state import RunState

# For the hashes of small caches, so that wrong ones leave no trace of a run.
GRACE_SECONDS = 0.2


def run(model_config: ModelConfig, train: TrainConfig, argv: list[str]) -> int:
    """Train as the flags say. Returns 0 when complete, 75 when a signal stopped it at a step.

    Raises UserError for whatever the user can put right.
    """
    # Said even where nothing is asked for: attention on a CPU says it again and again, and a matrix
    # library that was told may divide its work otherwise than one that chose.
    torch.set_num_threads(train.threads or torch.get_num_threads())
    with device_for(choose_device(train.device)) as device:
        return _run_on(device, model_config, train, argv)


def _run_on(
    device: torch.device, model_config: ModelConfig, train: TrainConfig, argv: list[str]
) -> int:
    ranks = start(device, train.ddp_timeout_seconds)
    if device.type == "cuda":
        # Sums in a fixed order, so that a resumed run repeats to the bit; ops that have none warn.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    home = Path(train.out_dir) / train.run_name
    folder = home if ranks.is_main else home / f"rank{ranks.rank}"
    on_wait = (lambda: show_other_writer(home)) if train.publish else None
    try:
        with folder_lock(folder, on_wait):
            return _locked_run(model_config, train, argv, ranks, folder)
    finally:
        stop(ranks)


def _locked_run(
    model_config: ModelConfig, train: TrainConfig, argv: list[str], ranks: Ranks, folder: Path
) -> int:
    remove_leftovers(folder)
    if train.publish:
        make_directory(train.publish)  # now, not after hours of training
    plan = make_plan(model_config, train, ranks.world, folder / "plans")
    check_agreement(train, plan, ranks)
    if on_main(lambda: _is_complete(folder, train, plan), ranks):
        return 0
    origin = describe(ranks.device)  # now: files may be edited while the run goes on
    model, optimizer = build_model(model_config, train, ranks)
    state, saved = RunState(), set()
    if train.resume:
        state, saved = _resume(folder, train, plan, ranks, model, optimizer)
    plan.verification.wait(GRACE_SECONDS)
    state.begin_attempt(inexact_values(model, train, ranks))
    trainer = Trainer(model_config, train, plan, ranks, folder, model, optimizer, state, saved)
    if ranks.is_main:
        # When this extends a shorter run, its record must not vouch for what follows.
        (folder / "run.json").unlink(missing_ok=True)
        write_json(folder / "config.json", _config_values(model_config, train, plan))
    if not trainer.loop():
        return EXIT_STOPPED
    plan.await_verification(ranks)
    if ranks.is_main:
        finish(folder, train, plan, ranks, model, state, origin | {"argv": argv})
        publish(folder, train)
    return 0


def check_agreement(train: TrainConfig, plan: Plan, ranks: Ranks) -> None:
    """UserError on every rank, naming the values, when one would not do the same as rank 0."""
    alike = ("save_every", "resume", "on_bad_step", "hf_export")  # not part of the fingerprint
    mine = plan.fingerprint | {name: getattr(train, name) for name in alike}
    mine |= {"steps": plan.steps, "torch": torch.__version__}
    mine["autotune"] = sha256_file(train.autotune) if train.autotune else None
    everyone = gather_objects(mine, ranks)
    for rank, other in enumerate(everyone):
        if differing := differences(everyone[0], other):
            raise UserError(
                f"rank {rank} differs from rank 0: {differing}; start all ranks alike, on the same "
                "data and code"
            )


def _is_complete(folder: Path, train: TrainConfig, plan: Plan) -> bool:
    """Whether the folder holds this very run, complete; it is then published. UserError when it
    holds another run."""
    config = folder / "config.json"
    if not config.exists():
        return False
    if not train.resume:
        raise UserError(
            f"{folder} already holds a run; continue it with --resume, or choose another --run-name"
        )
    check_fingerprint(folder, read_section(config, "fingerprint"), plan.fingerprint)
    if not adopt(folder, train, plan):
        return False
    plan.verification.wait()
    print(f"{folder}: already complete", file=sys.stderr)
    publish(folder, train)
    return True


def _resume(
    folder: Path,
    train: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    model: Transformer,
    optimizer: HybridOptimizer,
) -> tuple[RunState, set[int]]:
    """Restore the newest checkpoint that is valid, and the same, on every rank; a fresh state if
    there is none. Returns it with the steps of all such checkpoints.

    UserError when it is past the steps asked for.
    """
    found = gather_objects(valid_steps(folder, plan.run), ranks)
    saved = {s for s in set.intersection(*map(set, found)) if len({x[s] for x in found}) == 1}
    newest = max(saved, default=0)
    if newest > plan.steps:
        raise UserError(
            f"{folder} is already at step {newest}, but the run asked for has {plan.steps}; raise "
            "--max-train-steps, or choose another --run-name"
        )
    state = RunState()
    if newest:
        path = folder / f"step{newest}"
        state = RunState.from_json(load_step(path, model, optimizer))
        made = state.step - len(state.guard.skipped)
        if optimizer.updates != made:
            raise UserError(
                f"{path} holds an optimizer state of {optimizer.updates} updates, not {made}; "
                "remove this checkpoint"
            )
        print(f"resuming {train.run_name} after step {state.step}", file=sys.stderr)
    if ranks.is_main:
        cut_metrics(folder / "metrics.jsonl", state.step)
    # Damaged, or not the same on all ranks: about to be written again.
    remove_steps(folder, lambda step: step > state.step)
    return state, saved


def _config_values(model: ModelConfig, train: TrainConfig, plan: Plan) -> dict:
    counts = parameter_counts(model)
    return {
        "arguments": dataclasses.asdict(train),
        "model": dataclasses.asdict(model),
        "parameters": counts,
        "data": plan.data,
        "steps": plan.steps,
        "schedule_steps": plan.schedule_steps,
        "fingerprint": plan.fingerprint,
    }

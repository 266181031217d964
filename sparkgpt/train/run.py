"""One run from start, or from its newest checkpoint, to its record."""

import dataclasses
import shutil
import sys
from pathlib import Path

import torch

from sparkgpt.checkpoint import check_fingerprint, load_step, newest_valid, steps_in
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.distributed import Ranks, choose_device, gather_objects, start, stop
from sparkgpt.errors import UserError
from sparkgpt.files import make_directory, read_section, write_json
from sparkgpt.lock import folder_lock
from sparkgpt.metrics import cut_metrics
from sparkgpt.model.cost import parameter_counts
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.train.build import build_model
from sparkgpt.train.finish import adopt, finish, publish, show_other_writer
from sparkgpt.train.loop import Trainer
from sparkgpt.train.plan import Plan, make_plan
from sparkgpt.train.signals import EXIT_STOPPED
from sparkgpt.train.state import RunState


def run(model_config: ModelConfig, train: TrainConfig, argv: list[str]) -> int:
    """Train as the flags say. Returns 0 when complete, 75 when a signal stopped it at a step.

    Raises UserError for whatever the user can put right.
    """
    device = choose_device(train.device)
    if train.threads:
        torch.set_num_threads(train.threads)
    ranks = start(device, train.ddp_timeout_seconds)
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
    if train.publish:
        make_directory(train.publish)  # now, not after hours of training
    plan = make_plan(model_config, train, ranks.world)
    _check_folder(folder, train, plan)
    if adopt(folder, train, plan):
        print(f"{folder}: already complete", file=sys.stderr)
        publish(folder, train)
        return 0
    model, optimizer = build_model(model_config, train, ranks)
    state = RunState()
    if train.resume:
        state = _resume(folder, train, ranks, model, optimizer)
    state.begin_attempt()
    trainer = Trainer(model_config, train, plan, ranks, folder, model, optimizer, state)
    if ranks.is_main:
        write_json(folder / "config.json", _config_values(model_config, train, plan))
    if not trainer.loop():
        return EXIT_STOPPED
    if ranks.is_main:
        finish(folder, train, plan, ranks, model, state, argv)
        publish(folder, train)
    return 0


def _check_folder(folder: Path, train: TrainConfig, plan: Plan) -> None:
    """Refuse to mix two runs in one folder."""
    config = folder / "config.json"
    if not config.exists():
        return
    if not train.resume:
        raise UserError(
            f"{folder} already holds a run; continue it with --resume, or choose another --run-name"
        )
    check_fingerprint(folder, read_section(config, "fingerprint"), plan.fingerprint)


def _resume(
    folder: Path, train: TrainConfig, ranks: Ranks, model: Transformer, optimizer: HybridOptimizer
) -> RunState:
    """Restore the newest checkpoint that is valid on every rank; a fresh state if there is none."""
    newest = newest_valid(folder)
    common = min(gather_objects(newest[0] if newest else 0, ranks))
    if newest and newest[0] != common:
        newest = newest_valid(folder, at_most=common)
    state = RunState()
    if newest and common:
        state = RunState.from_json(load_step(newest[1], model, optimizer))
    print(f"resuming {train.run_name} after step {state.step}", file=sys.stderr)
    if ranks.is_main:
        cut_metrics(folder / "metrics.jsonl", state.step)
    for step, path in steps_in(folder):
        if step > state.step:  # damaged, or ahead of the other ranks: about to be written again
            stale = path.with_name(f".{path.name}.stale")
            shutil.rmtree(stale, ignore_errors=True)
            path.rename(stale)
            shutil.rmtree(folder / f"hf_{path.name}", ignore_errors=True)
    return state


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

"""A finished run's files: weights, summary, provenance; and their way into the pipeline."""

import math
import re
import resource
import shutil
import sys
from pathlib import Path

import torch

from sparkgpt.checkpoint import FINAL_WEIGHTS, save_final
from sparkgpt.config import TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.errors import UserError
from sparkgpt.files import (
    make_directory,
    read_json,
    remove_leftovers,
    replacing,
    sha256_file,
    write_json,
)
from sparkgpt.metrics import read_metrics
from sparkgpt.model.cost import parameter_counts
from sparkgpt.model.transformer import Transformer
from sparkgpt.train.plan import Plan
from sparkgpt.train.state import RunState

# In the order in which they are published: the record comes last, and stands for all of them.
PUBLISHED = ("config.json", "metrics.jsonl", FINAL_WEIGHTS, "summary.json", "run.json")


def finish(
    folder: Path,
    train: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    model: Transformer,
    state: RunState,
    origin: dict,
) -> None:
    """Write final weights (and hf/) if asked to, then summary.json and run.json."""
    weights = None
    if train.save_final:
        weights = save_final(folder, model)
        if train.hf_export:
            write_hf(folder / "hf", model)
    state.mark_attempt("complete")
    write_json(folder / "summary.json", summary(train, plan, ranks, model, state, weights))
    record = origin | {
        "run": train.run_name,
        "arguments": vars(train) | vars(model.config),
        "data": plan.data,
        "autotune": sha256_file(train.autotune) if train.autotune else None,
        "seeds": {"init": train.seed, "data": train.order_seed},
        "attempts": state.attempts,
        "exact": state.exact,
        "skipped": state.guard.skipped,
        "validations": state.validations,
        "weights_sha256": weights,
    }
    write_json(folder / "run.json", record)


def summary(
    train: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    model: Transformer,
    state: RunState,
    weights: str | None,
) -> dict:
    """The final figures; losses in nats per target, memory in bytes, rates per training second."""
    counts = parameter_counts(model.config)
    final = state.validations[-1][1] if state.validations else None
    steady = state.second_half.rates()
    return {
        "run": train.run_name,
        "row": re.sub(r"-s\d+$", "", train.run_name),
        "seed": train.seed,
        "steps": state.step,
        "tokens_per_batch": train.tokens_per_batch,
        "accumulate": train.accumulate,
        "world_size": ranks.world,
        "real_tokens": state.real_tokens,
        "window_tokens": state.total.window_tokens,
        "utilization": state.total.rates()["utilization"],
        "parameters": counts["total"],
        "active_parameters": counts["active"],
        "window_tokens_per_second": steady["window_tokens_per_second"],
        "real_tokens_per_second": steady["real_tokens_per_second"],
        "tflops_per_second": steady["tflops_per_second"],
        "peak_memory_bytes": peak_memory(ranks.device),
        "wall_seconds": round(sum(attempt["seconds"] for attempt in state.attempts), 3),
        "train_seconds": round(state.train_seconds, 3),
        "save_seconds": round(sum(attempt["save_seconds"] for attempt in state.attempts), 3),
        "skipped_steps": len(state.guard.skipped),
        "initial_loss": state.initial_loss,
        "final_train_loss": state.train_loss,
        "final_val_loss": final,
        "final_val_bpb": None if final is None else final / math.log(2),
        "val_tokens": plan.data["val_tokens"],
        "train_digest": plan.data["train"]["digest"],
        "val_digest": plan.data["val"]["digest"] if plan.data["val"] else None,
        "stream_digest": plan.data["stream"],
        "weights_sha256": weights,
        "optimizer": train.optimizer,
        "device": str(ranks.device),
        "threads": torch.get_num_threads(),
    }


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the device for CUDA, resident set of the process for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def write_hf(out: Path, model: Transformer) -> None:
    """The model as a stock Hugging Face directory."""
    from sparkgpt.export.hf import write_hf as write

    write({k: v.detach().cpu() for k, v in model.state_dict().items()}, model.config, out)


def write_hf_twin(folder: Path, step: int, model: Transformer) -> Path:
    """Write hf_step<N>/ beside the checkpoint step<N>/, and return it."""
    out = folder / f"hf_step{step}"
    write_hf(out, model)
    return out


def adopt(folder: Path, train: TrainConfig, plan: Plan) -> bool:
    """Whether `folder` already holds this run, complete (its fingerprint was checked before).

    UserError when it holds a longer one: its weights are not those of the steps asked for.
    """
    if not (folder / "run.json").exists():
        return False
    steps = read_json(folder / "summary.json")["steps"]
    if steps > plan.steps:
        raise UserError(
            f"{folder} holds a complete run of {steps} steps, not {plan.steps}; "
            "choose another --run-name"
        )
    weights = folder / FINAL_WEIGHTS
    return steps == plan.steps and (weights.exists() or not train.save_final)


def publish(folder: Path, train: TrainConfig) -> None:
    """Copy the final files to --publish, each by rename, the record last."""
    if not train.publish:
        return
    target = make_directory(train.publish)
    remove_leftovers(target)
    (target / "run.json").unlink(missing_ok=True)  # an older record mustn't vouch for newer files
    for name in PUBLISHED:
        if (folder / name).exists():
            with replacing(target / name) as temporary:
                shutil.copyfile(folder / name, temporary)


def show_other_writer(folder: Path) -> None:
    """One line about the process that is writing this run, while the pipeline waits for it."""
    lines = read_metrics(folder / "metrics.jsonl")
    step = lines[-1]["step"] if lines else 0
    print(f"{folder} is being trained by another process, step {step}; waiting", file=sys.stderr)

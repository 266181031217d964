"""Ranks: who am I, and sums over all of us.

Started by torchrun (its environment variables); one process otherwise.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkgpt.errors import RankLost, UserError


def choose_device(wanted: str) -> str:
    """'cpu' or 'cuda' for a --device; UserError when CUDA is asked for and isn't there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch sees no CUDA device; install torch for CUDA "
            "(`make TORCH=cu130`), or use cpu"
        )
    return wanted


@dataclass(frozen=True)
class Ranks:
    """This process among `world` processes; `device` is the one it computes on, `timeout` how many
    seconds it waits for the others."""

    rank: int
    world: int
    device: torch.device
    timeout: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device_name: str, timeout_seconds: int) -> Ranks:
    """Join the process group that torchrun describes, if any: nccl on CUDA, gloo on a CPU.

    UserError when the others don't come in time.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device_name == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world == 1:
        return Ranks(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    ranks = Ranks(int(os.environ["RANK"]), world, device, timeout_seconds)
    with together(ranks):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        dist.barrier()
    return ranks


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Around what all ranks do at once: RankLost when another one is gone or silent.

    gloo and the store raise subclasses of RuntimeError then. nccl's watchdog ends the process
    instead, with a message of its own.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).split("\n")[0]
        raise RankLost(
            f"rank {ranks.rank}: another rank is gone or did not answer within "
            f"--ddp-timeout-seconds ({ranks.timeout} s); see its own message, then start all ranks "
            f"again with --resume ({said})",
            exit_code=1,
        ) from error


def stop(ranks: Ranks) -> None:
    """Leave the process group."""
    if ranks.world > 1:
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done what was queued; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sum_over_ranks(value: Tensor, ranks: Ranks) -> Tensor:
    """`value` summed over ranks, in place; itself with one rank."""
    if ranks.world > 1:
        with together(ranks):
            dist.all_reduce(value)
    return value


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace each gradient by its sum over ranks, through one flat buffer.

    A sum, not a mean: the loss is already divided by the global batch's count. A rank that saw no
    real target contributes zeros.
    """
    if ranks.world == 1:
        return
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    sum_over_ranks(flat, ranks)
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def broadcast_object(value: object, ranks: Ranks) -> object:
    """Rank 0's `value`, on every rank."""
    if ranks.world == 1:
        return value
    box = [value]
    with together(ranks):
        dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(action: Callable[[], object], ranks: Ranks) -> object:
    """What `action()` returns on rank 0, on every rank; its UserError is raised on every rank."""
    result, error = None, None
    if ranks.is_main:
        try:
            result = action()
        except UserError as caught:
            error = caught
    result, error = broadcast_object((result, error), ranks)
    if error:
        raise error
    return result


def gather_objects(value: object, ranks: Ranks) -> list[object]:
    """Every rank's `value`, in rank order, on every rank."""
    if ranks.world == 1:
        return [value]
    values: list[object] = [None] * ranks.world
    with together(ranks):
        dist.all_gather_object(values, value)
    return values

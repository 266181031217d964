"""Ranks: who am I, and sums over all of us.

Started by torchrun (its environment variables); one process otherwise.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkgpt.errors import UserError


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
    """This process among `world` processes; `device` is the one it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device_name: str, timeout_seconds: int) -> Ranks:
    """Join the process group that torchrun describes, if any: nccl on CUDA, gloo on a CPU."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device_name == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world == 1:
        return Ranks(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return Ranks(dist.get_rank(), world, device)


def stop(ranks: Ranks) -> None:
    """Leave the process group."""
    if ranks.world > 1:
        dist.destroy_process_group()


def sum_over_ranks(value: Tensor, ranks: Ranks) -> Tensor:
    """`value` summed over ranks, in place; itself with one rank."""
    if ranks.world > 1:
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
    dist.all_reduce(flat)
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def broadcast_object(value: object, ranks: Ranks) -> object:
    """Rank 0's `value`, on every rank."""
    if ranks.world == 1:
        return value
    box = [value]
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
    dist.all_gather_object(values, value)
    return values

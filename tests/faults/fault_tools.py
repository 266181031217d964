"""What several tests of faults need: poisoned memory, and a step's gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparkgpt.config import TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.train.step import train_step, window_loss

ALONE = Ranks(0, 1, torch.device("cpu"))


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, every uninitialised tensor that torch makes, inside its own operations too, is
    full of NaN (of the largest value, for integers)."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all(), (
            "this torch does not fill: the test would prove nothing"
        )
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)


class Recorder:
    """An optimizer that keeps the gradients of a step, good or bad, and changes nothing."""

    def __init__(self, model):
        self.model, self.gradients = model, {}

    def step(self, factor):
        pass

    def zero_grad(self):
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)


def gradients_of_step(model, windows, real_total, ranks=ALONE, loss_of=window_loss):
    """(loss, {parameter: gradient}) of a `train_step`, summed over ranks."""
    recorder = Recorder(model)
    result = train_step(
        model, loss_of, recorder, windows, real_total, 1.0, TrainConfig(), ranks, False
    )
    return result.loss, recorder.gradients

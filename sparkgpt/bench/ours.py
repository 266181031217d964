"""Our training step as a contestant: the real step over the real stream, optimizer included.

Shapes: T packed positions.
"""

import torch
from torch.profiler import record_function

from sparkgpt.bench.split import DATA, OPTIMIZER
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.data.stream import WindowStream
from sparkgpt.distributed import Ranks
from sparkgpt.errors import UserError
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.train.build import build_loss, build_model
from sparkgpt.train.step import train_step

CPU = Ranks(0, 1, torch.device("cpu"))


class OurStep:
    """`step(index)` lays out window `index` of the stream and trains on it, at the peak rates.

    Training lays out windows ahead, in a thread; here that is inside the step, and so an upper
    bound of its cost.
    """

    def __init__(self, config: ModelConfig, train: TrainConfig, stream: WindowStream):
        self.train, self.stream = train, stream
        self.model, optimizer = build_model(config, train, CPU)
        self.optimizer = _Recorded(optimizer)
        self.loss_of = build_loss(train, CPU)

    def ready(self, index: int):
        return lambda: self.step(index)

    def step(self, index: int) -> None:
        """One update. UserError (exit code 1) when it was left out, and so not a whole step."""
        with record_function(DATA):
            window = self.stream.window(index)
        result = train_step(
            self.model, self.loss_of, self.optimizer, [window], window.real_tokens, 1.0, self.train,
            CPU, False,
        )  # fmt: skip
        if result.bad:
            raise UserError(
                f"step {index} was left out ({result.bad}), so its time says nothing; "
                "give other documents or another shape",
                exit_code=1,
            )


class _Recorded:
    """The optimizer, its update and the dropping of gradients marked for the profiler."""

    def __init__(self, optimizer: HybridOptimizer):
        self.optimizer = optimizer

    def step(self, factor: float) -> None:
        with record_function(OPTIMIZER):
            self.optimizer.step(factor)

    def zero_grad(self) -> None:
        with record_function(OPTIMIZER):
            self.optimizer.zero_grad()

"""`python sabotage.py DEED STEP FLAGS`: the trainer, to which something happens at one step.

kill and stop send SIGKILL and SIGSTOP to this process between the exchange of the step's gradients
and its update; weights and momentum change one element by its last bit, after the update. From the
step on, slow makes each step last 50 ms more.
"""

import math
import os
import signal
import sys
import time

from sparkgpt.cli import main
from sparkgpt.optim.hybrid import HybridOptimizer

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def sabotage(deed: str, step: int) -> None:
    """Replace the optimizer's update by one that does the deed at the `step`-th call."""
    update, calls = HybridOptimizer.step, 0

    def sabotaged(self, *arguments, **named):
        nonlocal calls
        calls += 1
        if calls == step and deed in SIGNALS:
            os.kill(os.getpid(), SIGNALS[deed])
        if calls >= step and deed == "slow":
            time.sleep(0.05)
        result = update(self, *arguments, **named)
        if calls == step and deed == "weights":
            change_last_bit(next(iter(self.names)).data)
        if calls == step and deed == "momentum":
            state = self.state_dict()
            change_last_bit(state[min(name for name in state if name.endswith("/momentum"))])
        return result

    HybridOptimizer.step = sabotaged


def change_last_bit(tensor) -> None:
    flat = tensor.view(-1)
    flat[0] = flat[0].nextafter(flat.new_tensor(math.inf))


if __name__ == "__main__":
    sabotage(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["train", *sys.argv[3:]]))

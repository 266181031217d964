"""Muon for the matrices and AdamW for the rest, as one optimizer."""

import torch
from torch import Tensor

from sparkgpt.config import TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.model.transformer import Transformer
from sparkgpt.optim.groups import Group, parameter_groups
from sparkgpt.optim.muon import Muon

BETAS = (0.9, 0.999)
EPS = 1e-8
ENTRIES = {Muon: ("momentum",), torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq")}


class HybridOptimizer:
    """Steps every parameter of a model once, each by its group's rule.

    State is a flat mapping of tensors named `<parameter>/<entry>`, so that checkpoints are plain
    safetensors and a state that doesn't fit the model is noticed by name. `kernels`: Muon computes
    by our own kernels.
    """

    def __init__(self, model: Transformer, train: TrainConfig, kernels: bool = False):
        groups = parameter_groups(model, train)
        self.names = {p: n for g in groups for n, p in zip(g.names, g.parameters, strict=True)}
        self.optimizers: list[torch.optim.Optimizer] = []
        muon = [g for g in groups if g.optimizer == "muon"]
        adamw = [g for g in groups if g.optimizer == "adamw"]
        if muon:
            self.optimizers.append(
                Muon(_torch_groups(muon), train.muon_lr, train.muon_momentum, kernels)
            )
        self.optimizers.append(
            torch.optim.AdamW(_torch_groups(adamw), betas=BETAS, eps=EPS, foreach=True)
        )

    def step(self, factor: float) -> None:
        """One update with every peak rate multiplied by `factor`."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @property
    def updates(self) -> int:
        """How many updates were made, over all attempts of a run."""
        adamw = self.optimizers[-1]
        return max((int(state["step"]) for state in adamw.state.values()), default=0)

    def state_dict(self) -> dict[str, Tensor]:
        """`{parameter}/{entry}` -> tensor, for momentum, exp_avg, exp_avg_sq and step."""
        return {
            f"{self.names[parameter]}/{entry}": value
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for entry, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave; dtypes and bits stay as saved.

        UserError when it isn't the state of these very parameters. One saved before the first
        update is empty.
        """
        by_name = {name: parameter for parameter, name in self.names.items()}
        owner = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        expected = {
            f"{self.names[p]}/{entry}": () if entry == "step" else p.shape
            for p, optimizer in owner.items()
            for entry in ENTRIES[type(optimizer)]
        }
        if state:
            _check_fits(state, expected)
        for key, value in state.items():
            name, entry = key.rsplit("/", 1)
            parameter = by_name[name]
            # AdamW keeps its step count on the host, where the update reads it without a sync.
            device = "cpu" if entry == "step" else parameter.device
            owner[parameter].state[parameter][entry] = value.to(device)


def _check_fits(state: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """UserError naming the first entry that is missing, unknown, or of another shape or dtype."""
    for name in sorted(expected.keys() | state.keys()):
        value = state.get(name)
        if value is None or name not in expected:
            fault = "is missing" if value is None else "belongs to no parameter"
        elif value.shape != expected[name] or value.dtype != torch.float32:
            fault = f"is {value.dtype} of shape {tuple(value.shape)}"
        else:
            continue
        raise UserError(
            f"the saved optimizer state does not fit the model: {name} {fault}; remove the "
            "checkpoint"
        )


def _torch_groups(groups: list[Group]) -> list[dict]:
    """torch's parameter groups; `peak_lr` keeps the rate that the schedule scales."""
    return [
        {"params": g.parameters, "lr": g.lr, "peak_lr": g.lr, "weight_decay": g.weight_decay}
        for g in groups
    ]

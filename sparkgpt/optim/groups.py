"""Which parameter is trained how: role -> optimizer, peak rate, weight decay."""

from dataclasses import dataclass, field

from torch import nn

from sparkgpt.config import TrainConfig
from sparkgpt.model.mup import role_of, width_ratio
from sparkgpt.model.transformer import Transformer


@dataclass
class Group:
    """Parameters that share an optimizer, a peak learning rate and a weight decay."""

    role: str
    optimizer: str  # 'muon' or 'adamw'
    lr: float
    weight_decay: float
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


def empty_groups(train: TrainConfig, ratio: float) -> dict[str, Group]:
    """The rule of each role at width ratio m, without parameters.

    Under `--optimizer adamw` the hidden matrices get their AdamW rate divided by m, which is muP's
    rule for Adam (Yang et al. 2022, table 8), and no weight decay, as under Muon.
    """
    adamw, decay = train.adamw_lr, train.weight_decay
    if train.optimizer == "muon":
        matrices = ("muon", train.muon_lr, 0.0)
    else:
        matrices = ("adamw", (train.adamw_matrix_lr or adamw) / ratio, 0.0)
    rules = {
        "embedding": ("adamw", adamw, decay),
        "gain": ("adamw", adamw, decay),
        "head": ("adamw", adamw / ratio, decay),
        "router": ("adamw", train.router_lr or adamw, 0.0),
        "hidden": matrices,
        "residual": matrices,
    }
    return {role: Group(role, *rule) for role, rule in rules.items()}


def parameter_groups(model: Transformer, train: TrainConfig) -> list[Group]:
    """The non-empty groups of a model; together they hold each of its parameters exactly once."""
    groups = empty_groups(train, width_ratio(model.config.model_dim, train.mup_base_dim))
    for name, parameter in model.named_parameters():
        group = groups[role_of(name)]
        group.names.append(name)
        group.parameters.append(parameter)
    chosen = [group for group in groups.values() if group.parameters]
    ids = [id(p) for group in chosen for p in group.parameters]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    return chosen

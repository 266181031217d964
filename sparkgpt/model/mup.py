"""Maximal-update parametrisation: initial scales and learning-rate factors by width.

With m = width / base width: hidden matrices start at std / sqrt(m), those that write to the
residual stream at a further 1 / sqrt(2 * layers); the head starts at zero and its rate shrinks by
1 / m. Muon's update has unit spectral scale, so its rate needs no factor. Sources: Yang et al. 2022
(arXiv:2203.03466); 1 / sqrt(2 L) as in GPT-2 (Radford et al. 2019).
"""

import math

import torch
from torch import nn

from sparkgpt.config import TrainConfig
from sparkgpt.model.transformer import Transformer

# The role of a parameter, by the end of its name. Each parameter has exactly one.
ROLES = {
    "embed_tokens.weight": "embedding",
    "norm.weight": "gain",
    "layernorm.weight": "gain",
    "attention.qkv.weight": "hidden",
    "mlp.gate_up.weight": "hidden",
    "moe.gate_up": "hidden",
    "attention.o.weight": "residual",
    "mlp.down.weight": "residual",
    "moe.down": "residual",
    "moe.router.weight": "router",
    "lm_head.weight": "head",
}


def role_of(name: str) -> str:
    """'embedding', 'gain', 'hidden', 'residual', 'router' or 'head' for a state-dict name."""
    (role,) = {role for ending, role in ROLES.items() if name.endswith(ending)}
    return role


def width_ratio(model_dim: int, base_dim: int) -> float:
    """m = width / base width."""
    return model_dim / base_dim


@torch.no_grad()
def init_weights(model: Transformer, train: TrainConfig) -> None:
    """Fill every parameter of `model`, on its device, from a CPU generator seeded with train.seed.

    The draws follow the order of `named_parameters`, so equal seeds give equal weights anywhere.
    """
    config = model.config
    generator = torch.Generator().manual_seed(train.seed)
    hidden = train.mup_hidden_std / math.sqrt(width_ratio(config.model_dim, train.mup_base_dim))
    std = {
        "embedding": train.mup_emb_std,
        "hidden": hidden,
        "residual": hidden / math.sqrt(2 * config.model_layers),
        "router": train.router_init_std,
    }
    for name, parameter in model.named_parameters():
        role = role_of(name)
        if role == "gain":
            nn.init.ones_(parameter)
        elif role == "head":
            nn.init.zeros_(parameter)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std[role])

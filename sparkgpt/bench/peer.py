"""A model of transformers with our shape, trained as its users would: float32, SDPA, AdamW.

Two ways to train it on a packed window:

- masked: exact attention inside each document. The window is one sequence whose positions restart
  at each document; from those, transformers finds the documents by itself and gives SDPA a
  block-diagonal causal mask (1, 1, T, T), made anew each step, as the documents are. That is its
  documented way for packed sequences where no varlen kernel runs, as on a CPU; a batch of the
  documents, padded to the longest, computes on padding that packing is there to avoid.
- unmasked: the window cut into chunks of 2,048 bytes, a batch of them without masks, as is common:
  attention crosses from one document into the next, and documents are cut.

Shapes: B sequences, S positions of each, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgpt.bench.shapes import chunk_of
from sparkgpt.config import ModelConfig
from sparkgpt.data.stream import Window
from sparkgpt.errors import UserError
from sparkgpt.export.hf_config import to_hf_config
from sparkgpt.export.layout import split
from sparkgpt.vocab import IGNORE_INDEX

LEARNING_RATE = 5e-4


def build_peer(config: ModelConfig):
    """transformers' Qwen3ForCausalLM (or Qwen3MoeForCausalLM) of this shape, freshly initialised.

    UserError when transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError(
            "the step is compared with transformers, which is not installed; "
            "`pip install -e '.[export]'`, or give --only data,startup"
        ) from error
    values = AutoConfig.for_model(**to_hf_config(config, "float32"))
    return AutoModelForCausalLM.from_config(
        values, attn_implementation="sdpa", dtype=torch.float32
    ).train()


def stock_tensors(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Name in transformers' model -> view of our tensors (weights, or gradients under their names).

    As in an export, but for experts, which transformers holds packed in memory as we do.
    """
    parts = {k: v for k, v in split(state, config).items() if ".mlp.experts." not in k}
    for layer in config.sparse_layers:
        experts = f"model.layers.{layer}.mlp.experts."
        parts[experts + "gate_up_proj"] = state[f"layers.{layer}.moe.gate_up"]
        parts[experts + "down_proj"] = state[f"layers.{layer}.moe.down"]
    return parts


class PeerStep:
    """Forward, loss, backward and update of transformers' model with torch's fused AdamW."""

    def __init__(self, config: ModelConfig):
        self.model = build_peer(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def masked(self, window: Window) -> None:
        self._step(window.tokens_T[None], window.targets_T[None], window.positions_T[None])

    def unmasked(self, window: Window) -> None:
        chunk = chunk_of(len(window.tokens_T))
        self._step(window.tokens_T.view(-1, chunk), window.targets_T.view(-1, chunk), None)

    def _step(self, tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None) -> None:
        logits_BSV = peer_logits(self.model, tokens_BS, positions_BS)
        F.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX
        ).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def peer_logits(model, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
    """(B, S, V) float32; positions that restart make it keep documents apart (batch of one)."""
    return model(input_ids=tokens_BS, position_ids=positions_BS, use_cache=False).logits

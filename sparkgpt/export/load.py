"""A model for use, from a run folder or a stock Hugging Face directory."""

from pathlib import Path

import torch
from torch import Tensor

from sparkgpt.checkpoint import read_run
from sparkgpt.config import ModelConfig
from sparkgpt.distributed import choose_device
from sparkgpt.errors import UserError
from sparkgpt.export.hf import read_hf
from sparkgpt.files import read_json
from sparkgpt.model import Transformer
from sparkgpt.ops.attention import choose_backend


def read_weights(path: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and weights (native names) of a stock directory, or else of what `read_run` reads."""
    path = Path(path)
    if (path / "config.json").exists() and "model_type" in read_json(path / "config.json"):
        return read_hf(path)
    return read_run(path)


def load_model(path: Path | str, device: str = "auto") -> Transformer:
    """The model at `path` in evaluation mode: float32 on a CPU, bfloat16 compute on CUDA.

    `device` is auto, cpu or cuda. UserError when it is not there, or `path` holds no model.
    """
    where = torch.device(choose_device(device))
    return build_model(*read_weights(path), where)


def build_model(config: ModelConfig, state: dict[str, Tensor], device: torch.device) -> Transformer:
    """A model with these weights, in evaluation mode, computing as `load_model` says."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = Transformer(config, dtype, choose_backend("auto", device, config.head_dim))
    weights = {name: value.to(device, torch.float32) for name, value in state.items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        first = str(error).split("\n")[1].strip()
        raise UserError(
            f"these weights are not the model's of their config.json: {first}"
        ) from error
    return model.eval()

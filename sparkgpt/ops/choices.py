"""Which kernels a run uses: by its flags, and by what `sparkgpt autotune` recorded."""

from dataclasses import dataclass

from sparkgpt.config import TrainConfig
from sparkgpt.errors import UserError
from sparkgpt.files import read_json


@dataclass(frozen=True)
class Kernels:
    """The fused operations of a model and its optimizer; all off: the plain reference path.

    On CUDA they are Triton kernels; on a CPU the same formulas, forward and backward, in torch.
    """

    qk_rope: bool = False
    swiglu: bool = False
    dispatch: bool = False
    head: bool = False
    muon: bool = False


def kernels_of(train: TrainConfig, device: str) -> Kernels:
    """What the flags ask for on 'cpu' or 'cuda': those left out are on for CUDA only."""
    on = lambda flag: device == "cuda" if flag is None else flag
    return Kernels(
        qk_rope=on(train.fused_qk_rope),
        swiglu=on(train.fused_swiglu),
        dispatch=on(train.fused_dispatch),
        head=on(train.chunked_head),
        muon=on(train.triton_muon),
    )


def attention_key(heads: int, kv_heads: int, head_dim: int) -> str:
    """Name of a choice in the record: the shape that it was measured at."""
    return f"attention/q{heads}-kv{kv_heads}-h{head_dim}"


def attention_choice(path: str, device: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """The recorded back end for a shape on 'cpu' or 'cuda'.

    UserError when the record lacks it or is another device's: nothing is guessed.
    """
    key = attention_key(heads, kv_heads, head_dim)
    record = read_json(path)
    choices = record.get("choices", {}) if record.get("device", {}).get("type") == device else {}
    if key not in choices:
        raise UserError(
            f"--autotune {path} holds no choice for {key} on {device}; make a record with "
            f"`sparkgpt autotune --attention {heads},{kv_heads},{head_dim}`"
        )
    return choices[key]["winner"]

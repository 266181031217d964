"""Kernel choices that `sparkgpt autotune` recorded, as training reads them."""

from sparkgpt.errors import UserError
from sparkgpt.files import read_json


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

"""Kernel choices that `sparkgpt autotune` recorded, as training reads them."""

from sparkgpt.errors import UserError
from sparkgpt.files import read_json


def attention_key(heads: int, kv_heads: int, head_dim: int) -> str:
    """Name of a choice in the record: the shape that it was measured at."""
    return f"attention/q{heads}-kv{kv_heads}-h{head_dim}"


def attention_choice(path: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """The recorded back end for a shape. UserError when the record lacks it: nothing is guessed."""
    key = attention_key(heads, kv_heads, head_dim)
    choices = read_json(path).get("choices", {})
    if key not in choices:
        raise UserError(
            f"--autotune {path} holds no choice for {key}; make a record with `sparkgpt autotune "
            f"--attention {heads},{kv_heads},{head_dim}`"
        )
    return choices[key]["winner"]

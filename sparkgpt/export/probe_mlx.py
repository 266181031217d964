"""mlx_lm answers the questions; imported in the process of `probe.py` alone."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np

from sparkgpt.export.questions import Answer, Questions, inputs_of, round_trips, shown
from sparkgpt.vocab import BOS, EOS, PAD

VERSION = mlx_lm.__version__


def answer(directory: str, questions: Questions) -> Answer:
    """Load `directory` in float32 on the CPU and answer; `judge.py` reads the fields."""
    mx.set_default_device(mx.cpu)
    try:
        model, tokenizer = mlx_lm.load(directory)
    except ValueError as error:
        return _refusal(str(error)), []
    model.set_dtype(mx.float32)
    greedy = [_continue(model, tokenizer, text, questions.new_bytes) for text in questions.prompts]
    tried, failures = round_trips(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.encode,
        tokenizer.decode,
    )
    fields = {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
        "eos_ids": sorted(tokenizer.eos_token_ids),
        "greedy_ids": [ids for ids, _ in greedy],
        "greedy_text": [text for _, text in greedy],
        "tokenizer_round_trips": tried,
        "tokenizer_failures": failures,
        "nats": [_nats(model, document) for document in shown(questions.held_out, "mlx")],
    }
    return fields, [np.array(_logits(model, text)) for text in questions.documents]


def _refusal(message: str) -> dict[str, Any]:
    """mlx is strict: it raises where others list. Its message, as lists where it has that form."""
    fields: dict[str, Any] = {"error": f"mlx_lm refuses the directory: {message}"}
    for key, pattern in {
        "missing_keys": r"^Missing \d+ parameters: \n(.*)\.$",
        "unexpected_keys": r"^Received \d+ parameters not in model: \n(.*)\.$",
        "mismatched_keys": r"^Expected shape .* for parameter (.*)$",
    }.items():
        match = re.match(pattern, message, re.DOTALL)
        fields[key] = match[1].split(",\n") if match else []
    return fields


def _continue(model: Any, tokenizer: Any, prompt: bytes, count: int) -> tuple[list[int], str]:
    """`count` greedy tokens and the streamed text; the specials are masked, as everywhere here."""

    def mask(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, [BOS, EOS, PAD]] = -mx.inf
        return logits

    responses = mlx_lm.stream_generate(
        model, tokenizer, inputs_of(prompt), max_tokens=count, logits_processors=[mask]
    )
    parts = [(response.token, response.text) for response in responses]
    return [token for token, _ in parts], "".join(text for _, text in parts)


def _logits(model: Any, document: bytes) -> mx.array:
    return model(mx.array([inputs_of(document)]))[0]


def _nats(model: Any, document: bytes) -> float:
    """The library's own loss function, summed over one document's targets."""
    targets = mx.array([*document, EOS])
    return nn.losses.cross_entropy(_logits(model, document), targets, reduction="sum").item()

"""transformers answers the questions; imported in the process of `probe.py` alone."""

from typing import Any

import torch
import transformers
from torch import Tensor

from sparkgpt.export.questions import Answer, Questions, inputs_of, round_trips, shown
from sparkgpt.vocab import BOS, EOS, PAD

VERSION = transformers.__version__


def answer(directory: str, questions: Questions) -> Answer:
    """Load `directory` in float32 on the CPU and answer; `judge.py` reads the fields."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    greedy = [_continue(model, prompt, questions.new_bytes) for prompt in questions.prompts]
    tried, failures = round_trips(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda text: tokenizer(text)["input_ids"],
        tokenizer.decode,
    )
    fields = {
        **{key: sorted(map(_key_name, loading[key])) for key in keys},
        "eos_ids": _as_list(model.generation_config.eos_token_id),
        "greedy_ids": greedy,
        "greedy_text": [tokenizer.decode(ids) for ids in greedy],
        "tokenizer_round_trips": tried,
        "tokenizer_failures": failures,
        "nats": [_nats(model, document) for document in shown(questions.held_out, "transformers")],
    }
    with torch.no_grad():
        logits = [model(_batch(inputs_of(text))).logits[0].numpy() for text in questions.documents]
    return fields, logits


def _continue(model: Any, prompt: bytes, count: int) -> list[int]:
    """`count` greedy tokens; the specials are suppressed so that every answer has that length."""
    inputs = _batch(inputs_of(prompt))
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=count,
        suppress_tokens=[BOS, EOS, PAD],
    )
    return output[0, inputs.shape[1] :].tolist()


def _nats(model: Any, document: bytes) -> float:
    """The library's own loss, summed over one document's targets."""
    ids = _batch([BOS, *document, EOS])
    with torch.no_grad():
        return model(ids, labels=ids).loss.item() * (len(document) + 1)


def _batch(ids: list[int]) -> Tensor:
    return torch.tensor([ids])


def _key_name(key: Any) -> str:
    """A key, or the (key, shape, shape) of a mismatched one, as text."""
    return key if isinstance(key, str) else " ".join(map(str, key))


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]

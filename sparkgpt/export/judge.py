"""A stock directory in one library, compared with the run that it came from.

Ours is the run's weights in this package, float32 on the CPU; theirs is what a library makes of the
directory. Shapes: T packed positions, V vocabulary.
"""

import importlib.util
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparkgpt.checkpoint import read_run
from sparkgpt.data.cache import open_documents
from sparkgpt.data.stream import validation_windows
from sparkgpt.errors import UserError
from sparkgpt.export.load import build_model
from sparkgpt.export.probe import ask
from sparkgpt.export.questions import Questions, inputs_of, make_questions
from sparkgpt.files import read_json
from sparkgpt.generate import Sampling, generate
from sparkgpt.model import Transformer
from sparkgpt.vocab import BOS, EOS, PAD

LOGIT_TOLERANCE = 1e-4  # largest absolute difference in float32
# mlx has kernels of its own, whose rounding grows with the logits: of trained models, with logits
# up to 17, its largest difference was 1.2e-5 of the largest logit (transformers': 5e-7, on torch).
RELATIVE_TOLERANCE = {"transformers": 0.0, "mlx": 2e-5}
LOSS_TOLERANCE = 1e-4  # nats per target

# Library -> module that must be there, and how to get it.
REQUIRED = {
    "transformers": ("transformers", "pip install 'sparkgpt[export]'"),
    "mlx": ("mlx_lm", "pip install 'sparkgpt[mlx]'"),
}


def check(
    directory: Path, run: Path, library: str, data: str | None = None, python: str = sys.executable
) -> dict[str, Any]:
    """Compare `directory` in one library with `run`; the result says `ok` and lists `failures`.

    Keys: run, library, version, max_logit_difference, tolerance, missing_keys, unexpected_keys,
    mismatched_keys, greedy_equal, greedy_bytes, tokenizer_round_trips, library_val_loss and
    final_val_loss (nats per target, None without `data`), failures, ok. UserError when the library
    is not installed, a file is missing, or `data` is not what the run was validated on.
    """
    _require(library, python)
    model = _ours(directory, run)
    held_out, final_loss = _validation_set(run, data) if data else ([], None)
    questions = make_questions(model.config.max_position_embeddings, held_out)
    with tempfile.TemporaryDirectory(prefix="sparkgpt-check-") as folder:
        answer, logits = ask(library, directory, Path(folder), questions, python)
    result = {
        "run": run.resolve().name,
        "library": library,
        "version": answer["version"],
        "tolerance": LOGIT_TOLERANCE,
        "max_logit_difference": None,
        "greedy_equal": False,
        "greedy_bytes": 0,
        "tokenizer_round_trips": 0,
        "library_val_loss": None,
        "final_val_loss": final_loss,
        "failures": [],
    }
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        result[keys] = answer.get(keys, [])
        if result[keys]:
            result["failures"].append(f"{keys.replace('_', ' ')}: {_some(result[keys])}")
    if "error" in answer:
        result["failures"].append(" ".join(answer["error"].split()))
    else:
        _compare(result, answer, logits, model, questions)
    return result | {"ok": not result["failures"]}


def _compare(
    result: dict[str, Any],
    answer: dict[str, Any],
    logits: list[np.ndarray],
    model: Transformer,
    questions: Questions,
) -> None:
    """Fill in the measured values of `result`, and say in its failures what is wrong."""
    failures = result["failures"]
    difference, largest = _logit_difference(model, questions.documents, logits)
    tolerance = max(LOGIT_TOLERANCE, RELATIVE_TOLERANCE[result["library"]] * largest)
    result["tolerance"] = tolerance
    if math.isfinite(difference):
        result["max_logit_difference"] = difference
    if not difference <= tolerance:
        failures.append(f"logits differ by {difference:.3g}, more than {tolerance:.3g}")
    ours = _greedy(model, questions)
    same_text = [value.decode("utf-8", "replace") for value in ours] == answer["greedy_text"]
    result["greedy_equal"] = same_text and [list(value) for value in ours] == answer["greedy_ids"]
    result["greedy_bytes"] = sum(map(len, ours))
    if not result["greedy_equal"]:
        failures.append("greedy text differs from ours")
    if answer["eos_ids"] != [EOS]:
        failures.append(f"generation stops at {answer['eos_ids']}, not at [{EOS}]")
    result["tokenizer_round_trips"] = answer["tokenizer_round_trips"]
    if broken := answer["tokenizer_failures"]:
        failures.append(f"tokenizer changes {len(broken)} strings, first {broken[0]}")
    if questions.held_out:
        targets = sum(len(document) + 1 for document in questions.held_out)
        result["library_val_loss"] = loss = math.fsum(answer["nats"]) / targets
        if not abs(loss - result["final_val_loss"]) <= LOSS_TOLERANCE:
            failures.append(f"its loss is {loss:.6f}, the run's {result['final_val_loss']:.6f}")


def _require(library: str, python: str) -> None:
    module, install = REQUIRED[library]
    if python == sys.executable and importlib.util.find_spec(module) is None:
        raise UserError(f"--library {library}: {module} is not installed here; {install}")


def _ours(directory: Path, run: Path) -> Transformer:
    """The run's model in float32, its weights rounded to the dtype that the directory holds."""
    values = read_json(directory / "config.json")
    stored = getattr(torch, values.get("dtype") or values.get("torch_dtype") or "float32")
    config, state = read_run(run)
    state = {name: value.to(stored) for name, value in state.items()}
    return build_model(config, state, torch.device("cpu"))


def _validation_set(run: Path, data: str) -> tuple[list[bytes], float]:
    """The run's held-out documents, and its final loss on them in nats per target."""
    summary = read_json(run / "summary.json")
    arguments = read_json(run / "config.json")["arguments"]
    cache = open_documents(data)
    windows = validation_windows(cache, arguments["tokens_per_batch"], arguments["val_tokens"])
    if cache.digest != summary["val_digest"]:
        raise UserError(
            f"{data} is not what {run} was validated on: its digest is {cache.digest[:12]}, "
            f"the run's {str(summary['val_digest'])[:12]}; give the run's --val-path"
        )
    documents = [cache.document(i).tobytes() for window in windows for i in window.doc_ids]
    return documents, summary["final_val_loss"]


def _logit_difference(
    model: Transformer, documents: list[bytes], theirs: list[np.ndarray]
) -> tuple[float, float]:
    """Largest absolute difference, and our largest absolute logit; ours come from one packed
    window. The difference is NaN when either side has one."""
    ids = [torch.tensor(inputs_of(document)) for document in documents]
    lengths = torch.tensor([0, *map(len, ids)])
    positions_T = torch.cat([torch.arange(len(tokens)) for tokens in ids])
    with torch.no_grad():
        ours_TV, _ = model(torch.cat(ids), positions_T, lengths.cumsum(0).to(torch.int32))
    difference = float(np.abs(ours_TV.numpy() - np.concatenate(theirs)).max())
    return difference, float(ours_TV.abs().max())


def _greedy(model: Transformer, questions: Questions) -> list[bytes]:
    """Our greedy continuations; without EOS, so that each has its full length."""
    banned, greedy = (BOS, EOS, PAD), Sampling(temperature=0)
    count = questions.new_bytes
    return [bytes(generate(model, text, greedy, count, banned)) for text in questions.prompts]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

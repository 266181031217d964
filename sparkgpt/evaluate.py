"""Held-out loss of a model on whole documents, and `sparkgpt eval`.

Shapes: T packed positions, V vocabulary, S = segments + 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.progress import progress

if TYPE_CHECKING:
    from sparkgpt.data.stream import Window
    from sparkgpt.model import Transformer

SMALLEST_WINDOW = 8192  # positions; below this, short documents would be evaluated one by one


def evaluate(model: Transformer, windows: Iterable[Window]) -> dict[str, Any]:
    """Cross-entropy of `model` over the real targets of `windows`, without gradients.

    Returns nats_sum (float64 sum), tokens (real targets), nats (per target), bits_per_byte (the
    same over ln 2: one denominator, EOS included) and documents. The train mode is restored.
    Raises ValueError when there is no real target, as a mean over nothing is no number.
    """
    total, tokens, documents = 0.0, 0, 0
    was_training = model.training
    model.eval()
    try:
        for window in windows:
            total += _nats_sum(model, window)
            tokens += window.real_tokens
            documents += len(window.doc_ids)
    finally:
        model.train(was_training)
    if not tokens:
        raise ValueError("no real target to evaluate")
    nats = total / tokens
    return {
        "nats_sum": total,
        "tokens": tokens,
        "nats": nats,
        "bits_per_byte": nats / math.log(2),
        "documents": documents,
    }


def _nats_sum(model: Transformer, window: Window) -> float:
    """Sum over the window's real targets; each in float32, added in float64."""
    import torch

    from sparkgpt.loss import cross_entropy_sum

    window = window.to(next(model.parameters()).device)
    with torch.no_grad():
        logits_TV, _ = model(window.tokens_T, window.positions_T, window.cu_seqlens_S)
        return cross_entropy_sum(logits_TV, window.targets_T).item()


def main(argv: list[str]) -> int:
    """`sparkgpt eval`."""
    args = _parser().parse_args(argv)
    import torch

    from sparkgpt.data.cache import open_documents
    from sparkgpt.export.load import load_model

    if args.threads > 0:
        torch.set_num_threads(args.threads)
    model = load_model(args.model, args.device)
    cache = open_documents(args.data)
    window = args.tokens_per_batch or max(SMALLEST_WINDOW, model.config.max_position_embeddings)
    windows = _windows(cache, window, args, model.config.max_position_embeddings)
    result = evaluate(model, _shown(windows))
    result |= {"model": args.model, "data": args.data, "data_digest": cache.digest}
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['nats']:.4f} nats per target, {result['bits_per_byte']:.4f} bits per byte, "
            f"{result['tokens']} targets in {result['documents']} documents"
        )
    return 0


def _windows(cache: Any, window: int, args: argparse.Namespace, longest: int) -> list[Window]:
    """The leading documents of `cache`, whole. UserError when one is too long, or none fits."""
    from sparkgpt.data.stream import check_lengths, validation_windows

    check_lengths(
        cache, {"--tokens-per-batch": window, "the model's max_position_embeddings": longest}
    )
    first = int(cache.lengths[0]) + 1
    if 0 < args.tokens < first:
        raise UserError(
            f"--tokens {args.tokens} holds not even the first document of {args.data} "
            f"({first} targets); raise it"
        )
    return validation_windows(cache, window, args.tokens or sys.maxsize)


def _shown(windows: list[Window]) -> Iterator[Window]:
    with progress("evaluating, windows", len(windows)) as bar:
        for window in windows:
            yield window
            bar.advance()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparkgpt eval", description="Nats per target and bits per byte on whole documents."
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="run folder or Hugging Face directory"
    )
    parser.add_argument("--data", required=True, metavar="PATH", help="a cache or a JSONL file")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        metavar="N",
        help="at most N targets, in file order (0: all)",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=int,
        default=0,
        metavar="N",
        help=f"positions in one window (0: the model's limit, at least {SMALLEST_WINDOW})",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser

"""Continue a prompt, byte by byte, with a key/value cache; and `sparkgpt generate`.

Shapes: T new positions, C cached positions, D model width, N/K query/kv heads, H head dimension,
V vocabulary.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkgpt.errors import UserError
from sparkgpt.flags import Parser
from sparkgpt.vocab import BOS, EOS, PAD

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkgpt.model import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next byte is drawn. UserError on impossible values.

    temperature 0 takes the likeliest; top_k 0 and top_p 1 leave the distribution whole; top_p is
    nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751), after top_k.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature}: must be a number from 0 up")
        if abs(self.seed) >= 2**63:
            raise UserError(f"--seed {self.seed}: must fit in 63 bits")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}: must be at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1")


class KVCache:
    """Keys and values of every layer for up to `capacity` positions, in the compute dtype."""

    def __init__(self, model: Transformer, capacity: int):
        import torch

        config = model.config
        self.length = 0
        self.layers = torch.empty(
            (config.model_layers, 2, capacity, config.kv_heads, config.head_dim),
            dtype=model.compute_dtype,
            device=model.embed_tokens.weight.device,
        )


def extend(model: Transformer, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Float32 logits (T, V) of T tokens that follow the cached ones; the cache then holds them."""
    import torch

    from sparkgpt.ops.rope import rope_tables

    config, start = model.config, cache.length
    end = start + len(tokens)
    device = cache.layers.device
    positions_T = torch.arange(start, end, device=device)
    visible_TC = torch.arange(end, device=device) <= positions_T[:, None]
    with torch.no_grad():
        rope = rope_tables(positions_T, config.head_dim, config.rope_theta, model.compute_dtype)
        x_TD = model.embed_tokens(torch.tensor(tokens, device=device)).to(model.compute_dtype)
        for block, stored in zip(model.layers, cache.layers, strict=True):
            q_TNH, *kv = block.attention.project(block.input_layernorm(x_TD), *rope)
            stored[:, start:end] = torch.stack(kv)
            out_TNH = _attend(q_TNH, *stored[:, :end], visible_TC)
            x_TD = x_TD + block.attention.o(out_TNH.flatten(1))
            x_TD = x_TD + block.feed_forward(x_TD, None)[0]
        cache.length = end
        return model.logits(model.norm(x_TD))


def _attend(q_TNH: Tensor, k_CKH: Tensor, v_CKH: Tensor, visible_TC: Tensor) -> Tensor:
    import torch.nn.functional as F

    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_CKH, v_CKH))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_TC, enable_gqa=True)
    return out[0].transpose(0, 1)


def choose(
    logits_V: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    banned: Sequence[int] = (BOS, PAD),
) -> int:
    """Draw one token from logits (V,), never one of `banned`; equal generators, equal draw."""
    import torch

    logits_V = logits_V.to("cpu", torch.float64, copy=True)
    logits_V[list(banned)] = -torch.inf
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    best_V, order_V = logits_V.sort(descending=True, stable=True)
    kept = slice(0, sampling.top_k or None)
    # Minus the largest first, so that a tiny temperature is greedy instead of 0 * infinity.
    scaled = (best_V[kept] - best_V[0]) / sampling.temperature
    probs = torch.softmax(scaled, dim=0)
    # The smallest leading set whose probability reaches top_p, so the likeliest always stays.
    probs[probs.cumsum(0) - probs >= sampling.top_p] = 0
    return int(order_V[kept][torch.multinomial(probs, 1, generator=generator)])


def room_for(model: Transformer, prompt: bytes) -> int:
    """How many bytes fit after `prompt`: BOS, prompt and continuation share the positions.

    UserError when none does.
    """
    limit = model.config.max_position_embeddings
    room = limit - 1 - len(prompt)
    if room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} bytes, but the model's context is {limit} positions "
            f"(BOS takes one); shorten it to {limit - 2} bytes or fewer"
        )
    return room


def generate(
    model: Transformer,
    prompt: bytes,
    sampling: Sampling,
    max_bytes: int,
    banned: Sequence[int] = (BOS, PAD),
) -> Iterator[int]:
    """Yield the continuation's bytes until EOS, `max_bytes`, or the model's context is full.

    UserError when the prompt leaves no room.
    """
    import torch

    count = min(max_bytes, room_for(model, prompt))
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = KVCache(model, len(prompt) + count)
    pending = [BOS, *prompt]
    for _ in range(count):
        token = choose(extend(model, cache, pending)[-1], sampling, generator, banned)
        if token == EOS:
            return
        yield token
        pending = [token]


def stream_text(values: Iterable[int]) -> Iterator[str]:
    """Text of a stream of bytes as soon as it is complete; what is not UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for value in values:
        if text := decoder.decode(bytes([value])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def main(argv: list[str]) -> int:
    """`sparkgpt generate`."""
    args = _parser().parse_args(argv)
    if args.max_bytes < 0:
        raise UserError(f"--max-bytes {args.max_bytes}: must be at least 0")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    prompt = _prompt(args)
    from sparkgpt.export.load import load_model

    model = load_model(args.model, args.device)
    room = room_for(model, prompt)
    produced = bytearray()

    def recorded() -> Iterator[int]:
        for value in generate(model, prompt, sampling, args.max_bytes):
            produced.append(value)
            yield value

    _show(stream_text(recorded()), quiet=args.json)
    stopped = "end" if len(produced) < min(room, args.max_bytes) else "max-bytes"
    if stopped == "max-bytes" and room < args.max_bytes:
        stopped = "context"
        limit = model.config.max_position_embeddings
        print(f"sparkgpt: stopped: the context of {limit} positions is full", file=sys.stderr)
    if args.json:
        text = produced.decode("utf-8", "replace")
        print(json.dumps({"text": text, "hex": produced.hex(), "stopped": stopped}))
    return 0


def _prompt(args: argparse.Namespace) -> bytes:
    if args.prompt_file is None:
        return os.fsencode(args.prompt or "")  # arguments may hold bytes that are not text
    if args.prompt_file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(args.prompt_file).read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read --prompt-file {args.prompt_file}: {error.strerror}"
        ) from error


def _show(texts: Iterable[str], quiet: bool) -> None:
    """Write each text to stdout as UTF-8, whatever the locale, as it comes; `quiet` only reads."""
    for text in texts:
        if not quiet:
            sys.stdout.buffer.write(text.encode())
            sys.stdout.flush()
    if not quiet and sys.stdout.isatty():
        print()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sparkgpt generate", description="Continue a prompt with a trained model.")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="run folder or Hugging Face directory"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (none: a new document)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same from a file, - for stdin")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest byte")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest p")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    parser.add_argument("--max-bytes", type=int, default=256, help="stop after this many bytes")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser

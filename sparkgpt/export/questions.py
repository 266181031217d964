"""What a library is asked about an exported directory. numpy and the standard library only."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkgpt.progress import progress
from sparkgpt.vocab import BOS

NEW_BYTES = 48  # of each greedy continuation
PROMPT_BYTES = 40
LONG_BYTES = 1500

TEXTS = (
    "The heron stood in the shallows until the boat had passed, then went on fishing.\n",
    "Größe, Übermut und ein «stilles» Örtchen; год за годом; η θάλασσα; naïve cafe\u0301.",
    "春の海ひねもすのたり。한국어도 됩니다. مرحبا بالعالم، नमस्ते दुनिया 👩‍🚀🏳️‍🌈",
    "Ends early<|eos|> begins again<|bos|> fills up<|pad|>\r\n\ttabs\x00NUL",
)
BROKEN = bytes(range(256)) + b"\xff\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82cut\xf0\x9f\x98"

# A library's answer: named fields, and float32 logits (positions, 259) of each document.
Answer = tuple[dict[str, Any], list[np.ndarray]]


@dataclass(frozen=True)
class Questions:
    """Documents whose logits are wanted, prompts to continue greedily, and held-out documents."""

    documents: list[bytes]
    prompts: list[bytes]
    new_bytes: int
    held_out: list[bytes]

    def write(self, folder: Path) -> None:
        """Store as questions.npz."""
        arrays = {"new_bytes": np.array(self.new_bytes)}
        for name in ("documents", "prompts", "held_out"):
            values = getattr(self, name)
            arrays[name] = np.frombuffer(b"".join(values), np.uint8)
            arrays[name + "_lengths"] = np.array([len(value) for value in values], np.int64)
        np.savez(folder / "questions.npz", **arrays)

    @classmethod
    def read(cls, folder: Path) -> "Questions":
        """The inverse of `write`."""
        arrays = np.load(folder / "questions.npz")
        values = {}
        for name in ("documents", "prompts", "held_out"):
            ends = arrays[name + "_lengths"].cumsum()
            starts = ends - arrays[name + "_lengths"]
            flat = arrays[name].tobytes()
            values[name] = [flat[a:b] for a, b in zip(starts, ends, strict=True)]
        return cls(**values, new_bytes=int(arrays["new_bytes"]))


def make_questions(max_positions: int, held_out: Sequence[bytes] = ()) -> Questions:
    """Documents (multilingual, invalid bytes, empty, one byte, long) that fit `max_positions`."""
    texts = [text.encode() for text in TEXTS]
    noise = random.Random(0).randbytes(64)
    long = (b"".join(texts) + noise) * (LONG_BYTES // 300)
    documents = [*texts, BROKEN, b"", b"a", long[:LONG_BYTES], *held_out[:2]]
    limit = max_positions - 1
    new_bytes = min(NEW_BYTES, max_positions // 2)
    prompt = min(PROMPT_BYTES, limit - new_bytes)
    prompts = [text[:prompt] for text in (*texts, b"", *held_out[:1])]
    return Questions([text[:limit] for text in documents], prompts, new_bytes, list(held_out))


def inputs_of(document: bytes) -> list[int]:
    """BOS b1 .. bn."""
    return [BOS, *document]


def shown(documents: Sequence[bytes], library: str) -> Iterator[bytes]:
    """The documents one by one, with progress on stderr."""
    if documents:
        with progress(f"{library}: held-out documents", len(documents)) as bar:
            for document in documents:
                yield document
                bar.advance()


def round_trips(
    encode: Callable[[str], list[int]],
    encode_document: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
) -> tuple[int, list[str]]:
    """How many round trips through a tokenizer were tried, and a description of each that failed.

    `encode` adds no special token; `encode_document` adds what the tokenizer adds by itself, which
    must be one BOS in front.
    """
    failures = []
    texts = [*TEXTS, "", " ", "<|eos|>", "e\u0301\ufb01\u212b", *_random_texts(300)]
    for text in texts:
        ids = list(text.encode())
        if encode(text) != ids or encode_document(text) != [BOS, *ids] or decode(ids) != text:
            failures.append(f"text {text!a}")
    strings = [BROKEN, *_random_bytes(700)]
    for value in strings:
        if decode(list(value)) != value.decode("utf-8", "replace"):
            failures.append(f"bytes {value!r}")
    return len(texts) + len(strings), failures


def _random_texts(count: int) -> list[str]:
    draw = random.Random(1)
    points = [*range(0xD800), *range(0xE000, 0x110000)]  # surrogates are no text
    return ["".join(map(chr, draw.choices(points, k=draw.randint(1, 40)))) for _ in range(count)]


def _random_bytes(count: int) -> list[bytes]:
    """Byte strings rich in beginnings and pieces of UTF-8 sequences."""
    draw = random.Random(2)
    pieces = [bytes([value]) for value in range(256)]
    pieces += ["é".encode(), "€".encode(), "😀".encode()[:3], "€".encode()[:2]] * 30
    return [b"".join(draw.choices(pieces, k=draw.randint(1, 24))) for _ in range(count)]

"""Synthetic documents whose lengths are distributed like those of the news corpus.

Speeds depend on lengths, hardly on the text: words are random letters, with the line ends and
quotes that a JSON parser has to undo, and one character beyond ASCII a document, as most articles
have: it makes Python keep a text in two bytes a character, and encode it by the slower way.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from sparkgpt.data.store import FORMAT, OFFSET, ByteCache, write_cache
from sparkgpt.files import write_json

# Bytes of the 3,782 distinct articles at 0/32, 1/32 .. 31/32 of them, then at 99.5 % and the end.
QUANTILES = (
    0, 444, 632, 806, 979, 1139, 1276, 1418, 1583, 1742, 1888, 2034, 2155, 2282, 2414, 2550, 2714,
    2863, 3034, 3235, 3413, 3596, 3864, 4137, 4405, 4702, 5093, 5528, 6030, 6744, 7541, 8599,
    13900, 28401,
)  # fmt: skip
SHARES = (*(n / 32 for n in range(32)), 0.995, 1.0)
LONGEST = QUANTILES[-1]
QUOTE = "\u2019".encode()
TEXT_BYTES = 2**20  # of random text, from which documents are cut


def news_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    """Bytes of `count` documents, (count,) int64, each from 1 to `longest`.

    Drawn from the corpus' distribution, of which what is above `longest` is left out.
    """
    top = np.interp(longest, QUANTILES, SHARES)
    drawn = np.random.default_rng(seed).random(count) * top
    lengths = np.interp(drawn, SHARES, QUANTILES).astype(np.int64)
    return np.clip(lengths, 1, longest)


def synthetic_documents(lengths: np.ndarray, seed: int) -> Iterator[bytes]:
    """One document of each length (at most TEXT_BYTES), a piece of seeded random words."""
    text = _words(TEXT_BYTES + 1, seed)
    starts = np.random.default_rng(seed + 1).integers(0, TEXT_BYTES + 1 - lengths)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        begin = QUOTE if length >= len(QUOTE) else b""
        yield begin + text[start + len(begin) : start + length]


def write_jsonl(path: Path, lengths: np.ndarray, seed: int) -> int:
    """Write the synthetic documents as JSONL; the file's size in bytes."""
    with open(path, "wb") as file:
        for document in synthetic_documents(lengths, seed):
            file.write(orjson.dumps({"text": document.decode()}) + b"\n")
        return file.tell()


def write_synthetic_cache(folder: Path, lengths: np.ndarray, seed: int) -> ByteCache:
    """Write the synthetic documents as a byte cache, and open it."""
    folder.mkdir(parents=True)
    source = {"name": "synthetic", "size": int(lengths.sum()), "mtime_ns": 0}
    write_cache(folder, synthetic_documents(lengths, seed), source)
    return ByteCache.open(folder)


def write_sparse_cache(folder: Path, lengths: np.ndarray) -> None:
    """A byte cache of documents of these lengths, all of them zeros that take no disk.

    What is measured on it must not depend on content: opening, planning, rejoining a stream. Its
    digest is that of no content; `verify` would refuse it.
    """
    folder.mkdir(parents=True)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(OFFSET)
    offsets.tofile(folder / "offsets.bin")
    with open(folder / "bytes.bin", "wb") as file:
        file.truncate(int(offsets[-1]))
    totals = {"documents": len(lengths), "bytes": int(offsets[-1]), "digest": "0" * 64}
    source = {"name": "zeros", "size": int(offsets[-1]), "mtime_ns": 0}
    write_json(folder / "manifest.json", {"format": FORMAT, **totals, "source": source})


def _words(size: int, seed: int) -> bytes:
    """`size` bytes: letters, a space in 6, and a line end or a quote in 100."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, size, dtype=np.uint8)
    kind = rng.random(size)
    letters[kind < 1 / 6] = ord(" ")
    letters[kind < 0.02] = ord('"')
    letters[kind < 0.01] = ord("\n")
    return letters.tobytes()

"""Documents as memory-mapped bytes, one byte a token.

A byte cache is a folder of three files:
- bytes.bin: the documents' UTF-8 bytes, one after the other, without separators;
- offsets.bin: int64 little endian (documents + 1,), where each starts, and the end of the last;
- manifest.json: {"format", "documents", "bytes", "digest", "source": {"name", "size", "mtime_ns"}}.

The digest is that of the content alone: sha256 over the sha256 of the lengths (int64 little
endian) and the sha256 of the bytes. Equal documents in equal order give equal digests, wherever
they came from.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, write_json

FORMAT = 1
FILES = {"bytes.bin", "offsets.bin", "manifest.json"}
OFFSET = np.dtype("<i8")
BLOCK = 2**20  # documents, or bytes, looked at together: memory must not grow with a corpus
AGAIN = "remove the folder and make it again with `sparkgpt cache`"


@dataclass(frozen=True)
class ByteCache:
    """An open cache.

    bytes (total,) uint8 and offsets (documents + 1,) int64, both memory-mapped; manifest as in
    the module's docstring; path, where it lies.
    """

    path: Path
    bytes: np.ndarray
    offsets: np.ndarray
    manifest: dict

    @classmethod
    def open(cls, path: Path | str) -> "ByteCache":
        """Open a cache without reading its bytes.

        Raises UserError when it is no cache, another format, or its files don't fit together.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(
                f"{path} is not a byte cache of format {FORMAT}; give a cache or a JSONL file"
            )
        content = _map(path / "bytes.bin", np.dtype(np.uint8), manifest["bytes"])
        offsets = _map(path / "offsets.bin", OFFSET, manifest["documents"] + 1)
        cache = cls(path, content, offsets, manifest)
        falls = any(lengths.min(initial=0) < 0 for _, lengths in cache.length_blocks())
        if offsets[0] or offsets[-1] != len(content) or falls:
            raise UserError(f"{path}/offsets.bin does not fit bytes.bin; {AGAIN}")
        return cache

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def digest(self) -> str:
        """Hex sha256 of the content, as recorded when the cache was made."""
        return self.manifest["digest"]

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each document, (documents,) int64."""
        return np.diff(self.offsets)

    def length_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The lengths in bounded memory: (first document, bytes of each from there, int64)."""
        for first in range(0, len(self), BLOCK):
            yield first, np.diff(self.offsets[first : first + BLOCK + 1])
            _release(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """Bytes of one document, a uint8 view."""
        return self.bytes[self.offsets[index] : self.offsets[index + 1]]

    def release(self) -> None:
        """Let go of what was read: it stays in the system's cache, but is not this process's."""
        _release(self.bytes)
        _release(self.offsets)

    def length_digest(self) -> bytes:
        """sha256 of the lengths as they are read now, in bounded memory."""
        digest = hashlib.sha256()
        for _, lengths in self.length_blocks():
            digest.update(lengths.astype(OFFSET))
        return digest.digest()

    def verify(self) -> None:
        """Hash the content again, in bounded memory, beside other threads.

        Raises UserError when it is not what was written.
        """
        byte_hash = hashlib.sha256()
        for first in range(0, len(self.bytes), 16 * BLOCK):
            byte_hash.update(self.bytes[first : first + 16 * BLOCK])
            _release(self.bytes)
        if _digest(self.length_digest(), byte_hash.digest()) != self.digest:
            raise UserError(f"{self.path} holds other bytes than its manifest says; {AGAIN}")


def read_manifest(path: Path) -> dict | None:
    """The manifest of the cache at `path`; None when there is none of this format."""
    if not (path / "manifest.json").is_file():
        return None
    manifest = read_json(path / "manifest.json")
    return manifest if manifest.get("format") == FORMAT else None


def write_cache(folder: Path, documents: Iterable[bytes], source: dict) -> int:
    """Write a cache's files into `folder` in one pass, one document in memory at a time.

    Returns how many documents there were; with none, there is no manifest.
    """
    length_hash, byte_hash = hashlib.sha256(), hashlib.sha256()
    count = total = 0
    with open(folder / "bytes.bin", "wb") as content, open(folder / "offsets.bin", "wb") as offsets:
        offsets.write(bytes(OFFSET.itemsize))
        for document in documents:
            count += 1
            total += len(document)
            content.write(document)
            offsets.write(total.to_bytes(OFFSET.itemsize, "little"))
            byte_hash.update(document)
            length_hash.update(len(document).to_bytes(OFFSET.itemsize, "little"))
    if count:
        digest = _digest(length_hash.digest(), byte_hash.digest())
        totals = {"documents": count, "bytes": total, "digest": digest}
        write_json(folder / "manifest.json", {"format": FORMAT, **totals, "source": source})
    return count


def _digest(length_digest: bytes, byte_digest: bytes) -> str:
    return hashlib.sha256(length_digest + byte_digest).hexdigest()


def _release(mapped: np.ndarray) -> None:
    """Unmap the pages of a memory-mapped array until they are read again."""
    if isinstance(mapped.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.base.madvise(mmap.MADV_DONTNEED)


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file of exactly `count` elements, read-only."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {AGAIN}") from error
    if size != count * dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, its manifest says {count * dtype.itemsize}; {AGAIN}"
        )
    # An empty file can't be mapped; a corpus of empty documents has one.
    return np.memmap(path, dtype, mode="r") if count else np.zeros(0, dtype)

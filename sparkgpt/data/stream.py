"""Windows of packed documents as tensors, and the stream of them that training consumes.

Shapes: T positions in a window, S segments + 1. A document of n bytes fills n + 1 positions:
inputs `BOS b1 .. bn`, targets `b1 .. bn EOS`. The rest of a window is PAD, in segments of at most
256 positions of their own, so that filler attends to no real position and wastes no time.
"""

import hashlib
import json
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sparkgpt.data.epochs import Epochs
from sparkgpt.data.packing import ALGORITHM, next_fit
from sparkgpt.data.store import ByteCache
from sparkgpt.errors import UserError
from sparkgpt.vocab import BOS, EOS, FILLER, IGNORE_INDEX, PAD

STOP_SECONDS = 0.05  # how soon a prefetch thread notices that it is not needed


@dataclass(frozen=True)
class Window:
    """One packed window, on the CPU.

    tokens_T, targets_T (IGNORE_INDEX on PAD) and positions_T (0 at each segment's start) int64;
    cu_seqlens_S int32, rising strictly from 0 to T; doc_lengths: positions of each document;
    doc_ids: which they are; real_tokens: the sum of doc_lengths.
    """

    tokens_T: torch.Tensor
    targets_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens_S: torch.Tensor
    doc_lengths: list[int]
    doc_ids: list[int]
    real_tokens: int

    def to(self, device: torch.device) -> "Window":
        """The same window with its tensors on `device`, copied without waiting."""
        names = ("tokens_T", "targets_T", "positions_T", "cu_seqlens_S")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)


def make_window(cache: ByteCache, doc_ids: Sequence[int], window: int) -> Window:
    """Lay out whole documents, which must fit, in their order in a window of T = `window`."""
    return _lay_out([cache.document(index) for index in doc_ids], doc_ids, window)


def empty_window(window: int) -> Window:
    """A window of filler only, for a rank that has no documents left."""
    return _lay_out([], [], window)


def _lay_out(documents: list[np.ndarray], doc_ids: Sequence[int], window: int) -> Window:
    lengths = [len(document) + 1 for document in documents]
    real = sum(lengths)
    fillers, rest = divmod(window - real, FILLER)
    segments = lengths + [FILLER] * fillers + [rest] * (rest > 0)
    cu_seqlens_S = np.concatenate(([0], np.cumsum(segments)))
    starts, ends = cu_seqlens_S[: len(lengths)], cu_seqlens_S[1 : len(lengths) + 1]

    tokens_T = np.full(window, PAD, np.int64)
    tokens_T[starts] = BOS
    for document, start, end in zip(documents, starts.tolist(), ends.tolist(), strict=True):
        tokens_T[start + 1 : end] = document
    targets_T = np.full(window, IGNORE_INDEX, np.int64)
    targets_T[: max(real - 1, 0)] = tokens_T[1:real]
    targets_T[ends - 1] = EOS
    positions_T = np.arange(window) - np.repeat(cu_seqlens_S[:-1], segments)
    return Window(
        torch.from_numpy(tokens_T),
        torch.from_numpy(targets_T),
        torch.from_numpy(positions_T),
        torch.from_numpy(cu_seqlens_S.astype(np.int32)),
        lengths,
        [int(index) for index in doc_ids],
        real,
    )


class WindowStream:
    """The windows of consecutive epochs, each in a seeded order of its own.

    `window(index)` depends on the index alone, so a rank rejoins the stream by its step. `keep` is
    a folder of this stream alone, where plans of large corpora are kept for the next start. Raises
    UserError when a document is longer than `window` positions.
    """

    def __init__(
        self, cache: ByteCache, *, window: int, buffer: int, seed: int, keep: Path | None = None
    ):
        self.cache, self.window_size, self.buffer, self.seed = cache, window, buffer, seed
        self._epochs = Epochs(cache, window, buffer, seed, self.digest, keep)

    @property
    def digest(self) -> str:
        """Hex sha256 of all that fixes the order: content, packing and its version, seed."""
        fixed = [self.cache.digest, ALGORITHM, self.window_size, self.buffer, self.seed]
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()

    def window(self, index: int) -> Window:
        """Window `index` >= 0 of the whole stream."""
        plan, place = self._epochs.locate(index)
        window = make_window(self.cache, plan.documents(place), self.window_size)
        self.cache.release()
        return window

    def real_tokens(self, index: int) -> int:
        """Real tokens of window `index`, from its plan alone."""
        plan, place = self._epochs.locate(index)
        return int(plan.real_tokens[place])

    def documents(self, index: int) -> list[int]:
        """Ids of the documents of window `index`, from its plan alone."""
        plan, place = self._epochs.locate(index)
        return plan.documents(place).tolist()

    def doc_lengths(self, index: int) -> list[int]:
        """Positions of each document of window `index`, from its plan alone."""
        offsets, ids = self.cache.offsets, np.array(self.documents(index))
        return (offsets[ids + 1] - offsets[ids] + 1).tolist()

    def windows_for(self, target_tokens: float) -> int:
        """How many windows from the first one hold at least `target_tokens` real tokens."""
        return self._epochs.windows_for(target_tokens)


def validation_windows(cache: ByteCache, window: int, max_tokens: int) -> list[Window]:
    """The held-out set: documents from the start, in file order, of <= `max_tokens` positions.

    Raises UserError when not even the first document fits, or one doesn't fit in a window.
    """
    few = cache.offsets[: max(max_tokens, 0) + 2]  # a document fills at least one position
    positions = np.diff(few) + 1
    count = int(np.searchsorted(np.cumsum(positions), max_tokens, side="right"))
    if not count:
        raise UserError(
            f"--val-tokens {max_tokens} holds not even the first document of {cache.path} "
            f"({positions[0]} positions); raise it"
        )
    return [make_window(cache, ids, window) for ids in next_fit(positions[:count], window)]


def check_lengths(cache: ByteCache, limits: dict[str, int]) -> None:
    """UserError if a document has more positions (bytes + 1) than a limit, given by its flag."""
    name, limit = min(limits.items(), key=lambda item: item[1])
    blocks = [first + np.flatnonzero(sizes >= limit) for first, sizes in cache.length_blocks()]
    over = np.concatenate(blocks)
    if len(over):
        positions = len(cache.document(over[0])) + 1
        others = f", as do {len(over) - 1} others" if len(over) > 1 else ""
        advice = f"raise {name}"
        if limit > 1:  # a limit of 0 bytes would mean none
            advice += f" or leave out with `sparkgpt prepare --max-document-bytes {limit - 1}`"
        raise UserError(
            f"document {over[0]} (from 0) of {cache.path} fills {positions} positions "
            f"(bytes + 1), more than {name} {limit}{others}; {advice}"
        )


def prefetch(items: Iterable, depth: int) -> Iterator:
    """Yield `items`, of which a thread makes up to `depth` ahead.

    An exception in the thread is raised here, in its place. Closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def offer(kind: str, value: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=STOP_SECONDS)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            for item in items:
                if not offer("item", item):
                    return
            offer("end", None)
        except BaseException as error:
            offer("error", error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (entry := ready.get())[0] == "item":
            yield entry[1]
        if entry[0] == "error":
            raise entry[1]
    finally:
        stopped.set()
        thread.join()

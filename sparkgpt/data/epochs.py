"""The plans of consecutive epochs as one row of windows, of which few are held at a time."""

import math
import threading
from pathlib import Path

import numpy as np

from sparkgpt.data.packing import PackPlan, plan_epoch
from sparkgpt.data.plans import PlanFiles
from sparkgpt.data.store import ByteCache

HELD = 2  # epochs: the current one, and its neighbour while a window range spans both
KEEP_FROM = 2**17  # documents; fewer are planned about as soon as a file is read


class Epochs:
    """Plans of a cache's epochs; threads may share it.

    `keep` is a folder of this object alone, in which those held lie as files, under `key`, if they
    are of KEEP_FROM documents or more: whoever starts again finds them there. UserError when a
    document is longer than `window` positions, or the disk is full.
    """

    def __init__(
        self, cache: ByteCache, window: int, buffer: int, seed: int, key: str, keep: Path | None
    ):
        self._cache, self._arguments = cache, (window, buffer, seed)
        self._files = None
        if keep and len(cache) >= KEEP_FROM:
            # With the lengths as they are: whether they are right may not be known yet.
            self._files = PlanFiles(keep, f"{key} {cache.length_digest().hex()}")
        self._lock = threading.RLock()
        self._last: int | None = None  # the target's epoch: held until the end
        kept = self._files.load() if self._files else {}
        self._plans = {epoch: plan for epoch, (_, plan) in kept.items()}
        # Number of the first window of epochs in the whole row, as far as it is known.
        self._firsts = {0: 0} | {epoch: first for epoch, (first, _) in kept.items()}
        if not kept:
            self._plan(0)

    def locate(self, index: int) -> tuple[PackPlan, int]:
        """The plan that holds window `index`, and its place there."""
        with self._lock:
            epoch = max(known for known, first in self._firsts.items() if first <= index)
            while index >= self._first(epoch + 1):
                epoch += 1
            return self._plan(epoch), index - self._firsts[epoch]

    def windows_for(self, target_positions: float) -> int:
        """How many windows from the first one hold at least that many real tokens."""
        target = max(math.ceil(target_positions), 1)
        everything = len(self._cache) + int(self._cache.offsets[-1])
        with self._lock:
            self._last, rest = divmod(target - 1, everything)
            first = self._first(self._last)
            sums = np.cumsum(self._plan(self._last).real_tokens, dtype=np.int64)
        return first + int(np.searchsorted(sums, rest + 1)) + 1

    def _first(self, epoch: int) -> int:
        """Number of an epoch's first window; plans the epochs before it if need be."""
        if epoch not in self._firsts:
            before = max(known for known in self._firsts if known < epoch)
            for known in range(before, epoch):
                self._firsts[known + 1] = self._firsts[known] + len(self._plan(known))
        return self._firsts[epoch]

    def _plan(self, epoch: int) -> PackPlan:
        if epoch not in self._plans:
            plan = plan_epoch(self._positions(), *self._arguments, epoch)
            if self._files:
                plan = self._files.write(epoch, self._firsts[epoch], plan)
            self._plans[epoch] = plan
            for old in [e for e in self._plans if e != self._last][:-HELD]:
                del self._plans[old]
            if self._files:
                self._files.prune(set(self._plans))
        return self._plans[epoch]

    def _positions(self) -> np.ndarray:
        """Positions of each document, (documents,) int32: half of what its lengths take."""
        positions = np.empty(len(self._cache), np.int32)
        for first, lengths in self._cache.length_blocks():
            # A document past int32 is longer than any window, which the plan will say.
            positions[first : first + len(lengths)] = np.minimum(lengths, 2**31 - 2) + 1
        return positions

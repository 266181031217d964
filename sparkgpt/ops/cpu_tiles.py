"""How `sparkgpt.ops.cpu_attention` cuts a window: into strips, the work that a thread takes at a
time, and those into tiles. Nothing but lengths and heads decides it.

Positions are the window's. Shapes: T packed positions, N query heads, K key/value heads, G = N / K,
H head dimension, P positions of a tile's queries, R = P * G.
"""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Enough rows for a core's full speed, whose scores against so many keys stay in its caches. More
# positions would compute more scores of later keys in vain.
ROWS, POSITIONS, KEYS = 256, 128, 2048
STRIP = 1024  # positions of a document for each of its strips
ALONE = 1 << 16  # scores that are computed sooner than another thread starts


class Tile(NamedTuple):
    """Queries first .. end - 1 of a key/value head's group, in the document from `start`; `part`
    is their place in a tensor (T, N, ...)."""

    head: int
    start: int
    first: int
    end: int
    part: tuple[slice, slice]


class Strip(NamedTuple):
    """The `turn`-th strip of a key/value head in the document from `start`, by its queries."""

    head: int
    start: int
    first: int
    end: int
    turn: int

    @property
    def scores(self) -> int:
        """Of one query head."""
        seen = self.first + self.end - 2 * self.start + 1  # by first and last query together
        return (self.end - self.first) * seen // 2


class Cut:
    """The strips of a window, longest first, and the number of threads that they keep busy."""

    def __init__(self, q_TNH: Tensor, kv_heads: int, lengths: list[int]):
        self.groups = q_TNH.shape[1] // kv_heads
        self.positions = min(POSITIONS, max(16, ROWS // self.groups))
        self.keys = KEYS // self.positions * self.positions
        starts = accumulate(lengths, initial=0)
        # The longest first; a document's strips in turn, whose gradients wait for one another.
        documents = sorted(zip(lengths, starts, strict=False), key=lambda one: -self._strip(one[0]))
        self.strips = [
            Strip(head, start, start + first, start + end, turn)
            for length, start in documents
            for turn, (first, end) in enumerate(self._bounds(length))
            for head in range(kv_heads)
        ]
        scores = sum(strip.scores for strip in self.strips) * self.groups
        self.threads = min(torch.get_num_threads(), len(self.strips), 1 + scores // ALONE)
        longest = max(lengths)
        self.highest, self.widest = min(self.positions, longest), min(self.keys, longest)
        self.dtype = q_TNH.dtype

    @staticmethod
    def _strip(length: int) -> float:
        """Scores of each of a document's strips, about."""
        return length**2 / math.ceil(length / STRIP)

    def _bounds(self, length: int) -> list[tuple[int, int]]:
        """First and end query of a document's strips: tiles in full, scores about equal."""
        parts = math.ceil(length / STRIP)
        tiles = length / self.positions
        cuts = [round(tiles * math.sqrt(part / parts)) * self.positions for part in range(parts)]
        return list(zip(cuts, [*cuts[1:], length], strict=True))

    def tiles(self, strip: Strip) -> Iterator[Tile]:
        heads = slice(strip.head * self.groups, (strip.head + 1) * self.groups)
        for first in range(strip.first, strip.end, self.positions):
            end = min(first + self.positions, strip.end)
            yield Tile(strip.head, strip.start, first, end, (slice(first, end), heads))

    def key_ranges(self, tile: Tile) -> Iterator[tuple[int, int]]:
        """First and end key of what a tile reads at a time: all that is masked is in the last."""
        for first in range(tile.start, tile.end, self.keys):
            yield first, min(first + self.keys, tile.end)

    def mask(self) -> Tensor:
        """(R, P): what is added to the scores of queries and keys at the same positions."""
        square_PP = torch.full((self.highest, self.highest), -torch.inf, dtype=self.dtype)
        return square_PP.triu_(1).repeat_interleave(self.groups, 0)

    def room(self, *widths: int) -> list[Tensor]:
        """Of each width, memory for a tile's rows: (R * width,)"""
        rows = self.highest * self.groups
        return [torch.empty(rows * width, dtype=self.dtype) for width in widths]

"""Which documents share a window: best fit over a bounded buffer, whole documents only.

Documents arrive in a seeded order and wait in a buffer. A window takes the longest-waiting
documents until about two more will fill it, then the one or two that fill it best. So most
documents leave in the order in which they came, windows resemble one another, and none waits for
more than `buffer` windows. Once every document has arrived, windows start from the longest, which
would otherwise be left over alone. The finished windows are put in a seeded order of their own,
so that document lengths do not drift over an epoch; the last one, usually part empty, stays last.

Everything follows from (positions, window, buffer, seed, epoch). The only randomness is Philox's
raw stream, which NumPy keeps stable across its versions (NEP 19), unlike `Generator` methods.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np

from sparkgpt.errors import UserError

# Bump when the same input would give another plan: it is part of a stream's digest.
ALGORITHM = 1

# Chosen on the news corpus among 32 to 1/2048 of a window: a smaller tolerance spends the short
# documents on gaps too early, so that long ones end up alone (4,096-position windows: 95 %).
TOLERANCE_POSITIONS = 32
TOLERANCE_FRACTION = 256
CANDIDATES = 64  # oldest documents tried as one half of a closing pair


@dataclass(frozen=True)
class PackPlan:
    """One epoch's windows. Window w holds `doc_ids[window_starts[w]:window_starts[w + 1]]`.

    doc_ids (documents,) int64; window_starts (windows + 1,) int64; real_tokens (windows,) int64,
    the positions that the window's documents fill.
    """

    doc_ids: np.ndarray
    window_starts: np.ndarray
    real_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.real_tokens)

    def documents(self, index: int) -> np.ndarray:
        """Ids of the documents in window `index`, in their order there."""
        return self.doc_ids[self.window_starts[index] : self.window_starts[index + 1]]


def plan_epoch(
    positions: np.ndarray, window: int, buffer: int, seed: int, epoch: int = 0
) -> PackPlan:
    """Plan one epoch of documents of `positions` (documents,) int64 into windows.

    Raises UserError when there is no document, one is longer than `window`, or `buffer` < 1.
    """
    _check(positions, window, buffer)
    documents = len(positions)
    # SeedSequence takes no negative numbers; a negative seed is as good as any other.
    entropy = [seed % 2**64, epoch]
    stream = np.random.Philox(np.random.SeedSequence(entropy))
    order = np.argsort(stream.random_raw(documents), kind="stable")

    waiting = _Buffer(positions[order].tolist(), buffer)
    windows = []
    while waiting.refill():
        windows.append(_fill(waiting, window))
    shuffled = np.argsort(stream.random_raw(len(windows))[:-1], kind="stable").tolist()
    windows = [windows[i] for i in shuffled] + windows[-1:]

    arrivals = np.fromiter(chain.from_iterable(windows), dtype=np.int64, count=documents)
    starts = np.fromiter(accumulate(map(len, windows), initial=0), dtype=np.int64)
    doc_ids = order[arrivals]
    return PackPlan(doc_ids, starts, np.add.reduceat(positions[doc_ids], starts[:-1]))


def next_fit(positions: np.ndarray, window: int) -> list[range]:
    """Pack documents in their own order, opening a window whenever the next one doesn't fit.

    Returns the document ids of each window. Raises UserError like `plan_epoch`.
    """
    _check(positions, window, 1)
    windows, start, used = [], 0, 0
    for index, length in enumerate(positions.tolist()):
        if used + length > window:
            windows.append(range(start, index))
            start, used = index, 0
        used += length
    return [*windows, range(start, len(positions))]


def utilization(plan: PackPlan, window: int) -> tuple[float, float | None]:
    """Shares of positions that hold real tokens: of all windows, and without the last one.

    The second is None when there is only one window.
    """
    full = plan.real_tokens[:-1]
    return (
        float(plan.real_tokens.mean() / window),
        float(full.mean() / window) if len(full) else None,
    )


def _check(positions: np.ndarray, window: int, buffer: int) -> None:
    if buffer < 1:
        raise UserError(f"--pack-buffer {buffer}: must be at least 1")
    if not len(positions):
        raise UserError("there are no documents to pack; prepare some first")
    longest = int(positions.argmax())
    if positions[longest] > window:
        raise UserError(
            f"document {longest} fills {positions[longest]} positions (bytes + 1), more than a "
            f"window of {window}; leave it out with `sparkgpt prepare --max-document-bytes "
            f"{window - 1}` or use a larger window"
        )


class _Buffer:
    """Waiting documents, known by their order of arrival (rank), by age and by length."""

    def __init__(self, lengths: list[int], size: int):
        self.lengths, self.size = lengths, size
        self.arrived = 0
        self.total = 0  # positions waiting
        self.keys: list[int] = []  # sorted; length * documents + rank
        self.queue: deque[int] = deque()  # ranks by age; those gone are dropped lazily
        self.gone = bytearray(len(lengths))

    def refill(self) -> int:
        """Let documents arrive until the buffer is full; returns how many wait."""
        keys, lengths, count = self.keys, self.lengths, len(self.lengths)
        while len(keys) < self.size and self.arrived < count:
            length = lengths[self.arrived]
            key = length * count + self.arrived
            keys.insert(bisect_left(keys, key), key)
            self.queue.append(self.arrived)
            self.total += length
            self.arrived += 1
        return len(keys)

    def oldest(self) -> int:
        while self.gone[self.queue[0]]:
            self.queue.popleft()
        return self.queue[0]

    def longest(self, room: int, other: int = -1) -> int:
        """The longest document of at most `room` positions that isn't `other`, or -1."""
        count = len(self.lengths)
        index = bisect_left(self.keys, (room + 1) * count) - 1
        if index >= 0 and self.keys[index] % count == other:
            index -= 1
        return self.keys[index] % count if index >= 0 else -1

    def take(self, rank: int) -> int:
        """Remove a document; returns its positions."""
        length = self.lengths[rank]
        del self.keys[bisect_left(self.keys, length * len(self.lengths) + rank)]
        self.gone[rank] = 1
        self.total -= length
        return length


def _fill(waiting: _Buffer, window: int) -> list[int]:
    """Take one window's documents out of the buffer; returns their ranks."""
    all_arrived = waiting.arrived == len(waiting.lengths)
    placed = [waiting.longest(window) if all_arrived else waiting.oldest()]
    room = window - waiting.take(placed[0])
    while count := waiting.refill():
        rank = waiting.oldest()
        if room - waiting.lengths[rank] < 2 * waiting.total / count:
            break
        room -= waiting.take(rank)
        placed.append(rank)
    tolerance = min(window // TOLERANCE_FRACTION, TOLERANCE_POSITIONS)
    while waiting.refill() and (closing := _closing(waiting, room, tolerance)):
        room -= sum(map(waiting.take, closing))
        placed += closing
    return placed


def _closing(waiting: _Buffer, room: int, tolerance: int) -> list[int]:
    """The one or two documents that fill `room` best; a single one within tolerance is enough."""
    lengths, gone = waiting.lengths, waiting.gone
    single = waiting.longest(room)
    if single < 0:
        return []
    best, filled = [single], lengths[single]
    if room - filled <= tolerance:
        return best
    for rank in islice(waiting.queue, CANDIDATES):
        rest = room - lengths[rank]
        if rest <= 0 or gone[rank]:
            continue
        partner = waiting.longest(rest, other=rank)
        if partner >= 0 and lengths[rank] + lengths[partner] > filled:
            best, filled = [rank, partner], lengths[rank] + lengths[partner]
            if room - filled <= tolerance:
                break
    return best

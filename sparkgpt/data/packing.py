"""Which documents share a window: best fit over a bounded buffer, whole documents only.

Documents arrive in a seeded order, until as many as the buffer holds are in hand. Half of what
they fill is placed, in as many windows at once (`sparkgpt.data.bestfit`); the others wait for the
next documents, but none for more than a few such steps. So windows close with a choice from a
buffer that is half full, also in the end, when each step places half of what is left. The finished
windows are put in a seeded order of their own, so that document lengths do not drift over an
epoch; the last one, usually part empty, stays last.

Everything follows from (positions, window, buffer, seed, epoch). The only randomness is Philox's
raw stream, which NumPy keeps stable across its versions (NEP 19), unlike `Generator` methods; all
arithmetic is of integers, and no result depends on how a sort treats equal keys.
"""

from dataclasses import dataclass

import numpy as np

from sparkgpt.data.bestfit import by_value, fill, shuffled
from sparkgpt.errors import UserError

# Bump when the same input would give another plan: it is part of a stream's digest.
ALGORITHM = 2

LEAST_WINDOWS = 4  # that the documents in hand fill, however few the buffer holds


@dataclass(frozen=True)
class PackPlan:
    """One epoch's windows. Window w holds `doc_ids[window_starts[w]:window_starts[w + 1]]`.

    doc_ids (documents,), window_starts (windows + 1,), both of `index_type(documents)`, and
    real_tokens (windows,) int32, the positions that the window's documents fill.
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
    """Plan one epoch of documents of `positions` (documents,), any integers, into windows.

    With `buffer` 0 by next fit, in order of arrival, for comparison. Raises UserError when there is
    no document, one is longer than `window`, or `buffer` is negative.
    """
    _check(positions, window, buffer)
    documents = len(positions)
    # SeedSequence takes no negative numbers; a negative seed is as good as any other.
    stream = np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch]))
    order = shuffled(stream, documents).astype(index_type(documents))
    if buffer:
        placed, sizes = _place(positions[order], window, buffer, stream)
    else:
        placed = np.arange(documents)
        sizes = np.array([len(one) for one in next_fit(positions[order], window)])

    # The windows' final order, and where the documents of each begin before and after.
    windows = np.append(shuffled(stream, len(sizes) - 1), len(sizes) - 1)
    begins = (np.cumsum(sizes) - sizes)[windows]
    starts = np.append(0, np.cumsum(sizes[windows])).astype(order.dtype)
    moves = np.repeat((begins - starts[:-1]).astype(order.dtype), sizes[windows])
    moves += np.arange(documents, dtype=order.dtype)
    doc_ids = order[placed[moves]]
    real = np.add.reduceat(positions[doc_ids], starts[:-1])
    return PackPlan(doc_ids, starts, real.astype(np.int32))


def index_type(documents: int) -> np.dtype:
    """The smaller integer type, little endian, that holds numbers up to `documents`."""
    return np.dtype("<i4" if documents < 2**31 else "<i8")


def _place(
    lengths: np.ndarray, window: int, buffer: int, stream: np.random.Philox
) -> tuple[np.ndarray, np.ndarray]:
    """The documents, by their order of arrival, window after window (documents,); and how many
    each window holds (windows,)."""
    documents = len(lengths)
    placed, sizes = np.empty(documents, index_type(documents)), []
    hand = waits = np.zeros(0, np.int64)
    arrived = done = 0
    while done < documents:
        more = _arrivals(lengths, arrived, int(lengths[hand].sum()), len(hand), window, buffer)
        hand = np.concatenate([hand, np.arange(arrived, arrived + more)])
        waits = np.concatenate([waits, np.zeros(more, np.int64)])
        arrived += more
        longs = lengths[hand].astype(np.int64)
        count = max(int(longs.sum()) // (2 * window), 1)
        windows = fill(longs, waits, count, window, stream)
        left, gone = np.flatnonzero(windows < 0), np.flatnonzero(windows >= 0)
        sizes.append(np.bincount(windows[gone]))
        placed[done : done + len(gone)] = hand[gone[by_value(windows[gone])]]
        done += len(gone)
        hand, waits = hand[left], waits[left] + 1
    return placed, np.concatenate(sizes)


def _arrivals(
    lengths: np.ndarray, arrived: int, held: int, waiting: int, window: int, buffer: int
) -> int:
    """How many documents arrive next: up to a full buffer, or more to fill LEAST_WINDOWS."""
    more = max(buffer - waiting, 1)
    while arrived + more < len(lengths):
        if held + int(lengths[arrived : arrived + more].sum()) >= LEAST_WINDOWS * window:
            return more
        more *= 2
    return len(lengths) - arrived


def next_fit(positions: np.ndarray, window: int) -> list[range]:
    """Pack documents in their own order, opening a window whenever the next one doesn't fit.

    Returns the document ids of each window. Raises UserError like `plan_epoch`.
    """
    _check(positions, window, 0)
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
    if buffer < 0:
        raise UserError(f"--pack-buffer {buffer}: must be at least 0")
    if not len(positions):
        raise UserError("there are no documents to pack; prepare some first")
    longest = int(positions.argmax())
    if positions[longest] > window:
        raise UserError(
            f"document {longest} fills {positions[longest]} positions (bytes + 1), more than a "
            f"window of {window}; leave it out with `sparkgpt prepare --max-document-bytes "
            f"{window - 1}` or use a larger window"
        )

"""Fills many windows at once with documents in hand: the vectorised part of packing.

Shapes: D documents in hand, in their order of arrival; W windows; P documents of the pool, which
have no window yet, shortest first; A windows that are still being filled. Lengths and rooms are
positions, all arrays int64.
"""

import numpy as np

# Chosen on news, uniform and lognormal lengths among neighbours a factor of two apart.
ROOM_LEFT = 2  # mean documents, left free by the documents that come in order
# With less, long documents that just arrived wait for short ones, and are too many in the end.
PATIENCE = 4
GROWTH = 3  # mean documents; a window with more room than this takes whatever comes
PAIR_PART = 1024  # of the mean document: the tolerance that two documents have to meet at first
# Wider for one document: otherwise short ones, which fill any gap, run out and leave the long ones.
SINGLE_PART = 128


def shuffled(stream: np.random.Philox, count: int) -> np.ndarray:
    """The numbers 0 to `count` - 1 in a random order, (count,) int64."""
    bits = count.bit_length()
    low = np.uint64(2**bits - 1)
    keys = stream.random_raw(count)
    keys &= ~low
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def by_value(values: np.ndarray) -> np.ndarray:
    """Places of non-negative integers, smallest first; of equal ones the earlier first.

    A stable argsort, but several times as fast: NumPy sorts plain integers by SIMD.
    """
    keys, mask = _with_places(values)
    keys.sort()
    return keys & mask


def highest(values: np.ndarray, count: int) -> np.ndarray:
    """The last `count` of `by_value`, without sorting the others."""
    keys, mask = _with_places(values)
    keys.partition(len(keys) - count)
    return np.sort(keys[-count:]) & mask


def _with_places(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Each value with its place in the bits below, and the mask of those."""
    bits = len(values).bit_length()
    return (values << bits) | np.arange(len(values)), 2**bits - 1


def best_fit(sizes_P: np.ndarray, rooms_A: np.ndarray) -> np.ndarray:
    """For each room, smallest first, the largest document not yet taken that fits, or -1.

    sizes_P rises. This is a matching of brackets: over documents and rooms in the order of their
    size, a document opens, a room closes, and each closes what was last opened.
    """
    order_A = by_value(rooms_A)
    fitting_A = np.searchsorted(sizes_P, rooms_A[order_A], "right")
    number_A = np.arange(len(rooms_A))
    # Which documents are taken, at all: from the largest room down, the next free one below.
    taken = number_A + np.minimum.accumulate((fitting_A - 1 - number_A)[::-1])[::-1]
    taken = taken[taken >= 0]
    opened, closed = np.searchsorted(taken, fitting_A), np.searchsorted(fitting_A, taken, "right")
    number = np.arange(len(taken))
    place = np.concatenate([number + closed, number_A + opened])  # in the common order
    depth = np.concatenate([number + 1 - closed, opened - number_A]) + len(rooms_A)
    event = np.empty(len(place), np.int64)
    event[place] = np.arange(len(place))
    bits = len(place).bit_length()
    keys = np.sort((depth << bits) | place)
    event, depth = event[keys & (2**bits - 1)], keys >> bits
    pair = (event[:-1] < len(taken)) & (event[1:] >= len(taken)) & (depth[:-1] == depth[1:])
    result_A = np.full(len(rooms_A), -1)
    result_A[order_A[event[1:][pair] - len(taken)]] = taken[event[:-1][pair]]
    return result_A


def fill(
    lengths_D: np.ndarray, waits_D: np.ndarray, count: int, window: int, stream: np.random.Philox
) -> np.ndarray:
    """Fill W = `count` windows; the window of each document (D,), -1 for those that are left.

    There must be at least `count` documents. The longest get a window each, before them those that
    have been left more than PATIENCE times (`waits_D`). The others follow in order of arrival
    while a window has room for some; then the one or two of all that fill it best close it.
    """
    filling = _Filling(lengths_D, count, window, stream)
    first = highest(np.maximum(waits_D - PATIENCE, 0) * window + lengths_D, count)
    filling.put(first[shuffled(stream, count)], np.arange(count))
    filling.put_in_order()
    filling.close()
    return filling.place_D


class _Filling:
    """Windows being filled: the window of each document (-1: none), the room of each window."""

    def __init__(self, lengths_D: np.ndarray, count: int, window: int, stream: np.random.Philox):
        self.lengths_D, self.window, self.stream = lengths_D, window, stream
        self.place_D = np.full(len(lengths_D), -1)
        self.room_W = np.full(count, window)

    def put(self, documents: np.ndarray, windows: np.ndarray) -> None:
        """Place documents, at most one in each window."""
        self.place_D[documents] = windows
        self.room_W[windows] -= self.lengths_D[documents]

    def put_in_order(self) -> None:
        """Place documents by arrival, until each window has room for ROOM_LEFT or so.

        The windows' shares of room lie on a line, and the documents on it one after the other:
        each goes where it ends. Only the first in a window can hang over, and be too long.
        """
        waiting = np.flatnonzero(self.place_D < 0)
        sizes = self.lengths_D[waiting]
        spare = ROOM_LEFT * sizes.sum() // max(len(sizes), 1)
        borders_W = np.cumsum(np.maximum(self.room_W - spare, 0))
        ends = np.cumsum(sizes)
        ends = ends[: np.searchsorted(ends, borders_W[-1], "right")]
        windows = np.searchsorted(borders_W, ends)
        documents, sizes = waiting[: len(ends)], sizes[: len(ends)]
        load_W = np.bincount(windows, sizes, len(self.room_W)).astype(np.int64)
        first = np.flatnonzero(np.diff(windows, prepend=-1))
        first = first[(load_W > self.room_W)[windows[first]]]
        load_W[windows[first]] -= sizes[first]
        self.room_W -= load_W
        self.place_D[documents] = windows
        self.place_D[documents[first]] = -1

    def close(self) -> None:
        """Fill the rooms that are left, as long as any document fits.

        Each round accepts what leaves at most `tolerance` positions, and doubles it.
        """
        pool_P = np.flatnonzero(self.place_D < 0)
        pool_P = pool_P[by_value(self.lengths_D[pool_P])]
        mean = int(self.lengths_D.sum()) // len(self.lengths_D)
        tolerance, wide = mean // PAIR_PART, mean // SINGLE_PART
        windows_A = np.arange(len(self.room_W))
        while True:
            for put, allowed in ((self._singles, max(tolerance, wide)), (self._pairs, tolerance)):
                if not len(pool_P):
                    return
                windows_A = windows_A[self.room_W[windows_A] >= self.lengths_D[pool_P[0]]]
                if not len(windows_A):
                    return
                put(pool_P, windows_A, allowed)
                pool_P = pool_P[self.place_D[pool_P] < 0]
            tolerance = min(2 * tolerance + 1, self.window)

    def _singles(self, pool_P: np.ndarray, windows_A: np.ndarray, tolerance: int) -> None:
        """One document a window."""
        sizes_P, rooms_A = self.lengths_D[pool_P], self.room_W[windows_A]
        chosen_A = best_fit(sizes_P, rooms_A)
        good_A = (chosen_A >= 0) & (rooms_A - sizes_P[chosen_A] <= tolerance)
        self.put(pool_P[chosen_A[good_A]], windows_A[good_A])

    def _pairs(self, pool_P: np.ndarray, windows_A: np.ndarray, tolerance: int) -> None:
        """A random document that fits, and the best for what it leaves; the first one alone where
        that is enough, or where it leaves room for many."""
        sizes_P = self.lengths_D[pool_P]
        fitting_A = np.searchsorted(sizes_P, self.room_W[windows_A], "right")
        drawn_A = (self.stream.random_raw(len(windows_A)) >> np.uint64(32)).astype(np.int64)
        first_A = (drawn_A * fitting_A) >> 32
        owner_P = np.full(len(pool_P), -1)
        owner_P[first_A] = windows_A  # of several windows that drew the same, the last has it
        mine_A = owner_P[first_A] == windows_A
        first_A, windows_A = first_A[mine_A], windows_A[mine_A]

        rooms_A = self.room_W[windows_A] - sizes_P[first_A]
        free = np.flatnonzero(owner_P < 0)
        chosen_A = best_fit(sizes_P[free], rooms_A)
        found_A = chosen_A >= 0
        second_A = np.where(found_A, free[chosen_A] if len(free) else 0, 0)
        left_A = rooms_A - found_A * sizes_P[second_A]
        good_A = left_A <= tolerance
        both_A = good_A & found_A
        many_A = rooms_A * len(sizes_P) > GROWTH * sizes_P.sum()
        self.put(pool_P[first_A[good_A | many_A]], windows_A[good_A | many_A])
        self.put(pool_P[second_A[both_A]], windows_A[both_A])

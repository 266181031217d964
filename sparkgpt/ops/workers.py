"""Work shared out among threads, each of which computes on cores of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(tasks: list[Callable[[], Result]], threads: int | None = None) -> list[Result]:
    """The results of `tasks`, each run in a thread, the first in the caller's.

    torch computes on `threads` threads in each meanwhile, by default on an even share of the
    caller's, at least one. An exception of any task is raised when all have ended.
    """
    usual = torch.get_num_threads()
    each = threads or max(1, usual // len(tasks))
    try:
        with ThreadPoolExecutor(max(1, len(tasks) - 1)) as pool:
            others = [pool.submit(_on_threads, each, task) for task in tasks[1:]]
            first = _on_threads(each, tasks[0])
        return [first, *(other.result() for other in others)]
    finally:
        torch.set_num_threads(usual)


def share_out(work: Callable[[Iterator], None], items: list, threads: int) -> None:
    """Call `work` in `threads` threads, the caller's among them, with one iterator over `items`
    for all: each takes the next item when it is done with the last.

    torch computes on one thread in each meanwhile, so that results don't depend on `threads`, in
    inference mode; outputs are tensors made before. An exception of any thread is raised here.
    """
    queue = iter(items)  # a list's: threads take from it one after another
    side_by_side([partial(_in_inference_mode, work, queue)] * threads, 1)


def _on_threads(threads: int, task: Callable[[], Result]) -> Result:
    # A number of threads is each thread's own. A new thread's first look at it takes over the one
    # that any thread set last, and so must come before.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    return task()


def _in_inference_mode(work: Callable[[Iterator], None], queue: Iterator) -> None:
    # The caller's mode does not reach its threads. This one writes to tensors of either kind.
    with torch.inference_mode():
        work(queue)

"""Work shared out among threads, each of which computes on one core by itself."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


def share_out(work: Callable[[Iterator], None], items: list, threads: int) -> None:
    """Call `work` in `threads` threads, the caller's among them, with one iterator over `items`
    for all: each takes the next item when it is done with the last.

    torch computes on one thread in each meanwhile, so that results don't depend on `threads`, in
    inference mode; outputs are tensors made before. An exception of any thread is raised here.
    """
    queue = iter(items)  # a list's: threads take from it one after another
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max(1, threads - 1)) as pool:
            others = [pool.submit(_alone, work, queue) for _ in range(threads - 1)]
            _in_inference_mode(work, queue)
        for other in others:
            other.result()
    finally:
        torch.set_num_threads(usual)


def _alone(work: Callable[[Iterator], None], queue: Iterator) -> None:
    # A number of threads is each thread's own: a new one's is the machine's, not the caller's.
    torch.set_num_threads(1)
    _in_inference_mode(work, queue)


def _in_inference_mode(work: Callable[[Iterator], None], queue: Iterator) -> None:
    # The caller's mode does not reach its threads. This one writes to tensors of either kind.
    with torch.inference_mode():
        work(queue)

"""Progress for people: a rich bar on a terminal, plain lines elsewhere. Always on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PLAIN_SECONDS = 10.0  # between plain lines, so that a log of a long run stays readable


class PlainProgress:
    """Prints `label: done/total note` at most every PLAIN_SECONDS, and once at the end."""

    def __init__(self, label: str, total: int | None):
        self.label, self.total, self.done, self.note = label, total, 0, ""
        self.printed = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        finished = self.total is not None and self.done >= self.total
        if finished or time.monotonic() - self.printed >= PLAIN_SECONDS:
            self.printed = time.monotonic()
            total = "" if self.total is None else f"/{self.total}"
            print(f"{self.label}: {self.done}{total} {self.note}".rstrip(), file=sys.stderr)


class BarProgress:
    """The same calls on a rich progress bar."""

    def __init__(self, bar, task):
        self.bar, self.task = bar, task

    def advance(self, amount: int = 1, note: str = "") -> None:
        fields = {"note": note} if note else {}
        self.bar.update(self.task, advance=amount, **fields)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[PlainProgress | BarProgress]:
    """Context whose value has `advance(amount, note)`; `total` in the caller's own unit."""
    if not sys.stderr.isatty():
        yield PlainProgress(label, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield BarProgress(bar, bar.add_task(label, total=total, note=""))

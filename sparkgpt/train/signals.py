"""Stopping on request: a signal asks, the next step boundary answers."""

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again, the run goes on from its checkpoint


class StopRequest:
    """Remembers that SIGTERM, SIGINT or SIGUSR1 came; a second SIGINT acts at once, as by default.

    SIGTERM and SIGUSR1 may come twice for one request: a scheduler signals every process of a job,
    and torchrun passes on what it got itself.
    """

    def __init__(self) -> None:
        self.name = ""
        self.previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self.previous[number])

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return bool(self.name)

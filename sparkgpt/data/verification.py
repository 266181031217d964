"""Hashes caches while other work goes on, which asks for the result before it leaves any."""

import threading
from collections.abc import Iterable

from sparkgpt.data.store import ByteCache


class Verification:
    """`ByteCache.verify` of several caches in a thread, from now on.

    Hashing gives way to other threads only where it waits for the disk, so it costs a core for
    about a second a 1.5 GB; starting to train need not wait for it.
    """

    def __init__(self, caches: Iterable[ByteCache]):
        self._caches = list(caches)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="verification", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for cache in self._caches:
                cache.verify()
        except BaseException as error:
            self._error = error

    def failure(self) -> str | None:
        """What is wrong with a cache, once all were hashed; None when nothing is."""
        self._thread.join()
        return None if self._error is None else str(self._error)

    def wait(self, seconds: float | None = None) -> None:
        """Return once every cache is known to be what its manifest says, or after `seconds`.

        UserError when one is known to be something else.
        """
        self._thread.join(seconds)
        if self._error:
            raise self._error

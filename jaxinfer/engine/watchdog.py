"""`Watchdog`: notices that another thread does not come back from what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `on_stuck(seconds)`, once and from a thread of its own, when a `with` block of it takes
    longer than `timeout_s`.

    Entering and leaving costs a microsecond: the thread sleeps through any number of blocks, until
    the one that it last saw would be too old.
    """

    def __init__(self, timeout_s: float, on_stuck: Callable[[float], None]):
        self._timeout_s, self._on_stuck = timeout_s, on_stuck
        self._changed = threading.Condition()
        self._since: float | None = None  # when the block under way was entered
        self._is_idle = self._is_closed = False
        threading.Thread(target=self._watch, name="jaxinfer watchdog", daemon=True).start()

    def __enter__(self) -> None:
        with self._changed:
            self._since = time.monotonic()
            if self._is_idle:
                self._changed.notify()

    def __exit__(self, *exception) -> None:
        with self._changed:
            self._since = None

    def close(self) -> None:
        """Returns None; nothing is noticed any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        seconds = self._sleep_until_stuck()
        if seconds is not None:
            self._on_stuck(seconds)

    def _sleep_until_stuck(self) -> float | None:
        """How long the block under way has taken, which is too long; None once closed."""
        with self._changed:
            while not self._is_closed:
                if self._since is None:
                    self._is_idle = True
                    self._changed.wait()
                    self._is_idle = False
                    continue
                seconds = time.monotonic() - self._since
                if seconds > self._timeout_s:
                    return seconds
                self._changed.wait(self._timeout_s - seconds)
        return None

"""`CompileCounter`: how many programs XLA has compiled while somebody watched."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import jax.monitoring

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the compilations of the thread that is `watching`, also those that a cache answers.

    It hears of them by `jax.monitoring`, whoever causes them, until it is collected.
    """

    def __init__(self) -> None:
        self._heard = heard = SimpleNamespace(count=0, thread=None)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event == EVENT and heard.thread == threading.get_ident():
                heard.count += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
        weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, listen)

    @property
    def count(self) -> int:
        """Programs compiled while watching."""
        return self._heard.count

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what this thread compiles within."""
        self._heard.thread = threading.get_ident()
        try:
            yield
        finally:
            self._heard.thread = None

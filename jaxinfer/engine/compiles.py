"""`CompileCounter`: how many programs were compiled, or cached, while somebody watched."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_retrieval_time_sec"


class CompileCounter:
    """Counts the compilations of the threads that are `watching`, also those that a cache answers;
    or, of the event `CACHE_HIT`, these alone.

    It hears of them by `jax.monitoring`, whoever causes them, until it is collected.
    """

    def __init__(self, event: str = COMPILED) -> None:
        self._heard = heard = SimpleNamespace(count=0, threads=set())
        self._lock = lock = threading.Lock()
        counted = event

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event == counted and threading.get_ident() in heard.threads:
                with lock:
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
        thread = threading.get_ident()
        self._heard.threads.add(thread)
        try:
            yield
        finally:
            self._heard.threads.discard(thread)

"""`Delivery`: what a request has brought, on its way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterable

from jaxinfer.engine.answer import Answer
from jaxinfer.engine.outputs import RequestOutput

Waiter = asyncio.Future[None]


class Delivery:
    """Holds one output at most: the newest, with the deltas of those that nobody took before it.

    So a slow consumer costs no memory and misses nothing. The engine's thread puts, a task in any
    event loop takes; `wake` connects them.

    Attributes:
        answer: of which the outputs are snapshots; the engine's thread alone changes it.
        is_over: whether the last output was put, or it failed.
        has_failed: whether it ended without one.
        is_closed: whether nobody takes any more. A plain flag, so that a destructor may set it.
    """

    def __init__(self, answer: Answer):
        self.answer = answer
        self.is_over = self.has_failed = self.is_closed = False
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._waiter: Waiter | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the request is not over and has never run."""
        return not self.is_over and self.answer.requests[0].times.first_scheduled is None

    def put(self, output: RequestOutput, *, is_last: bool) -> Waiter | None:
        """Who is to be woken; `output` is there, unless it was over before."""
        with self._lock:
            if self.is_over:
                return None
            self._output = output if self._output is None else joined(self._output, output)
            self.is_over = is_last
            return self._taken_waiter()

    def fail(self) -> Waiter | None:
        """Who is to be woken; what was put before is all that comes."""
        with self._lock:
            self.is_over = self.has_failed = True
            return self._taken_waiter()

    async def take(self) -> RequestOutput | None:
        """What came since the last one was taken, waited for; None when no more comes."""
        while True:
            with self._lock:
                if self.is_closed:
                    return None
                output, self._output = self._output, None
                if output is not None or self.is_over:
                    return output
                if self._waiter is not None and not self._waiter.done():
                    raise RuntimeError(
                        "Two tasks wait for the next output of one request. Let one of them read."
                    )
                self._waiter = waiter = asyncio.get_running_loop().create_future()
            await waiter

    def _taken_waiter(self) -> Waiter | None:
        waiter, self._waiter = self._waiter, None
        return waiter


def joined(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """`later`, whose deltas begin with those of `earlier`."""
    pairs = zip(earlier.outputs, later.outputs, strict=True)
    outputs = (dataclasses.replace(b, text_delta=a.text_delta + b.text_delta) for a, b in pairs)
    return dataclasses.replace(later, outputs=tuple(outputs))


def wake(waiters: Iterable[Waiter | None]) -> None:
    """Returns None; each waiter goes on in its event loop, which is called once for all of its."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        if waiter is not None:
            by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, its in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits there any more
            loop.call_soon_threadsafe(_go_on, its)


def _go_on(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)

"""`Worker`: the one thread that runs an engine, and the way in for everybody else."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from types import FrameType
from typing import TypeVar

from jaxinfer.engine.watchdog import Watchdog

T = TypeVar("T")
Call = Callable[[], object]


class Worker:
    """A thread that makes steps while there is work and sleeps otherwise.

    What others want of the engine they hand in as calls; the thread makes them between two steps,
    in the order in which they came. It ends when it is told to, when a step or a posted call
    raises, or, for everybody else, when one of them takes longer than `timeout_s`. It is a daemon:
    a stuck step does not keep the process from ending.

    Args:
        step: makes a step; called while `has_work()`.
        on_failure: called with the error, by whichever thread found it, if that is how it ends.
        stuck: the error for a step that has taken so many seconds and stands in that function.
    """

    def __init__(
        self,
        step: Callable[[], None],
        has_work: Callable[[], bool],
        *,
        on_failure: Callable[[BaseException], None],
        stuck: Callable[[float, str], BaseException],
        timeout_s: float,
    ):
        self._step, self._has_work = step, has_work
        self._on_failure, self._stuck = on_failure, stuck
        # Its `put` may interrupt another in the same thread, so that destructors may post.
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the four below
        self._is_over = False
        self._refusal: BaseException | None = None
        self._traceback = None
        self._futures: set[Future] = set()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # from now on nobody can cancel it
        self._watchdog = Watchdog(timeout_s, self._on_stuck)
        self._thread = threading.Thread(target=self._run, name="jaxinfer engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Returns None while calls are taken; else raises what ended it, or the error of `stop`."""
        if self._refusal is not None:
            # Raised again and again it would keep every traceback.
            raise self._refusal.with_traceback(self._traceback)

    def post(self, call: Call) -> None:
        """Returns None; `call` is made between two steps, and must not raise. Never once it is
        over. Destructors may use this.
        """
        self._inbox.put(call)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What `function` returns or raises between two steps; what ended the worker if it ends
        before. Raises as `check` does.
        """
        future: Future[T] = Future()

        def make() -> None:
            if not future.done():
                _settle(future, function)

        with self._lock:
            self.check()
            self._futures.add(future)
            self.post(make)
        future.add_done_callback(self._forget)
        return future

    def stop(self, last: Call, refusal: BaseException) -> Future[None]:
        """Done when the worker is over, after `last`, a call behind all before it. `check` raises
        `refusal` from now on, unless it raises already.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
                self.post(lambda: (last(), self._end()))
        return self._ended

    def _run(self) -> None:
        try:
            while not self._is_over:
                calls = [] if self._has_work() else [self._inbox.get()]
                calls += [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
                with self._watchdog:
                    self._advance(calls)
        except BaseException as error:
            self._end(error)

    def _advance(self, calls: list[Call]) -> None:
        for call in calls:
            if not self._is_over:
                call()
        if self._has_work() and not self._is_over:
            self._step()

    def _on_stuck(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        self._end(self._stuck(seconds, _place(frame)))

    def _end(self, error: BaseException | None = None) -> None:
        """Returns None; it is over. Only the first end counts."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            if error is not None:
                self._refusal, self._traceback = error, error.__traceback__
            futures = list(self._futures)
        self._watchdog.close()
        if error is not None:
            for future in futures:
                _settle(future, self.check)
            self._on_failure(error)
        self._ended.set_result(None)

    def _forget(self, future: Future) -> None:
        with self._lock:
            self._futures.discard(future)


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Returns None; `future` has what `function` returns or raises, unless it is done before."""
    with contextlib.suppress(InvalidStateError):
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def _place(frame: FrameType | None) -> str:
    """The innermost function of this package in the stack of `frame`."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jaxinfer."):
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "no function of jaxinfer"

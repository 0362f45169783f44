"""`Timeline`: what device and host did when, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.bench.counters import Occupancy
from jaxinfer.engine.observer import Work

# How long a thread may keep the interpreter from one that wants to take the time, in seconds.
SWITCH_S = 1e-4

TRACKS = ("device: prefill calls", "device: decode windows", "device: nothing to do", "host")
_PREFILL, _DECODE, _GAP, _HOST = range(len(TRACKS))


@dataclass(frozen=True)
class Span:
    """One piece of work of the device, by the clock of the host.

    It began at `start_s`, when the host dispatched it or the work before it was done, and was over
    at `end_s`. The host was dispatching from `dispatch_s` to `dispatched_s`.
    """

    work: Work
    dispatch_s: float
    dispatched_s: float
    start_s: float
    end_s: float


class Timeline:
    """Observes an engine: give it as `Engine.observer` inside its `with`, which waits at its end
    for what is still under way.

    A thread waits for the results of each piece of work in turn and takes the time when they are
    ready, so that the engine itself is not held up.

    Args:
        clock: the engine's.
        wait: returns once the results it is given are ready.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ):
        self.spans: list[Span] = []
        self.reads: list[tuple[float, float]] = []  # when the host waited for results, from and to
        self._clock, self._wait = clock, wait
        self._queue: queue.SimpleQueue[tuple[Work, Any, float, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_times, daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> Timeline:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._queue.put(None)
        self._thread.join()
        sys.setswitchinterval(self._switch_s)
        if self._failure is not None:
            raise self._failure

    def dispatched(self, work: Work, results: Any, start_s: float) -> None:
        """See `Observer`."""
        self._queue.put((work, results, start_s, self._clock()))

    def fetched(self, start_s: float) -> None:
        """See `Observer`."""
        self.reads.append((start_s, self._clock()))

    def _take_times(self) -> None:
        before_s = float("-inf")
        try:
            while (item := self._queue.get()) is not None:
                work, results, dispatch_s, dispatched_s = item
                self._wait(results)
                end_s = self._clock()
                start_s = max(dispatch_s, before_s)
                self.spans.append(Span(work, dispatch_s, dispatched_s, start_s, end_s))
                before_s = end_s
                del item, results  # while this waits for more, the device may have their memory
        except Exception as failure:
            self._failure = failure


def chrome_trace(
    timeline: Timeline, samples: Sequence[Occupancy], start_s: float
) -> dict[str, Any]:
    """The trace as JSON data, its times in microseconds since `start_s`.

    Tracks: prefill calls and decode windows, each as long as the device had it and named after its
    shape; what the host did (dispatch, wait for results); and gaps, in which the device had
    nothing: no request was there, or the host was too late. Counters: pages in use, running and
    waiting requests, as `samples` have them.
    """
    spans = timeline.spans
    events = [_name("process_name", 0, "jaxinfer")]
    events += [_name("thread_name", track, name) for track, name in enumerate(TRACKS)]
    for span in spans:
        work, track = span.work, _PREFILL if span.work.kind == "prefill" else _DECODE
        name = f"{work.kind} {work.shape[0]}x{work.shape[1]}"
        used = {"rows": work.num_rows, "tokens": work.num_tokens}
        events.append(_event(name, track, start_s, span.start_s, span.end_s, used))
        dispatching = f"dispatch {work.kind}"
        events.append(_event(dispatching, _HOST, start_s, span.dispatch_s, span.dispatched_s))
    for before, after in itertools.pairwise(spans):
        if after.start_s > before.end_s:
            events.append(_event("gap", _GAP, start_s, before.end_s, after.start_s))
    events += [_event("wait", _HOST, start_s, begin, end) for begin, end in timeline.reads]
    events += _counters(samples)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


def _event(
    name: str,
    track: int,
    start_s: float,
    begin_s: float,
    end_s: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A complete event from `begin_s` to `end_s` of the clock."""
    times = {"ts": (begin_s - start_s) * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"name": name, "ph": "X", "pid": 0, "tid": track, **times, "args": args or {}}


def _counters(samples: Iterable[Occupancy]) -> list[dict[str, Any]]:
    """Two counter events for each sample, whose times are since the start already."""
    return [
        {"name": name, "ph": "C", "pid": 0, "ts": sample.time_s * 1e6, "args": values}
        for sample in samples
        for name, values in (
            ("pages", {"in use": sample.num_pages}),
            ("requests", {"running": sample.num_running, "waiting": sample.num_waiting}),
        )
    ]

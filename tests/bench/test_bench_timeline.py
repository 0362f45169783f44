"""The Chrome trace: spans and gaps of the device by hand, and its form."""

import json
import threading
from types import SimpleNamespace

import pytest

from jaxinfer.bench.counters import Occupancy
from jaxinfer.bench.timeline import Timeline, chrome_trace
from jaxinfer.engine.observer import Work

PREFILL = Work("prefill", (2, 32), 2, 50)
DECODE = Work("decode", (4, 8), 3, 24)


def observe(dispatches, reads=()):
    """The timeline of (work, dispatch began, dispatched, done) and of (began, ended) reads."""
    all_told = threading.Event()
    clock = SimpleNamespace(now=0.0)

    def wait(done_s):  # what stands for results here is when they are ready
        assert all_told.wait(10)
        clock.now = done_s

    with Timeline(lambda: clock.now, wait) as timeline:
        for work, began_s, dispatched_s, done_s in dispatches:
            clock.now = dispatched_s
            timeline.dispatched(work, done_s, began_s)
        for began_s, ended_s in reads:
            clock.now = ended_s
            timeline.fetched(began_s)
        all_told.set()
    return timeline


@pytest.fixture
def timeline():
    """Two calls back to back, then a window that the host was late to dispatch."""
    return observe(
        [(PREFILL, 10.0, 10.25, 11.0), (DECODE, 10.25, 10.5, 12.0), (DECODE, 12.5, 12.75, 14.0)],
        [(10.5, 11.0), (11.0, 12.0)],
    )


def events(trace, **wanted):
    """The events of `trace` with those values."""
    return [
        event
        for event in trace["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


def test_the_device_has_one_thing_after_the_other(timeline):
    assert [(span.work, span.start_s, span.end_s) for span in timeline.spans] == [
        (PREFILL, 10.0, 11.0),
        (DECODE, 11.0, 12.0),
        (DECODE, 12.5, 14.0),
    ]


def test_tracks(timeline):
    trace = chrome_trace(timeline, (), start_s=10.0)
    names = {event["tid"]: event["args"]["name"] for event in events(trace, name="thread_name")}
    spans = [
        (names[event["tid"]], event["name"], event["ts"], event["dur"])
        for event in events(trace, ph="X")
    ]
    assert sorted(spans) == [
        ("device: decode windows", "decode 4x8", 1.0e6, 1.0e6),
        ("device: decode windows", "decode 4x8", 2.5e6, 1.5e6),
        ("device: nothing to do", "gap", 2.0e6, 0.5e6),
        ("device: prefill calls", "prefill 2x32", 0.0, 1.0e6),
        ("host", "dispatch decode", 0.25e6, 0.25e6),
        ("host", "dispatch decode", 2.5e6, 0.25e6),
        ("host", "dispatch prefill", 0.0, 0.25e6),
        ("host", "wait", 0.5e6, 0.5e6),
        ("host", "wait", 1.0e6, 1.0e6),
    ]
    (prefill,) = events(trace, name="prefill 2x32")
    assert prefill["args"] == {"rows": 2, "tokens": 50}
    assert json.loads(json.dumps(trace)) == trace


def test_counters(timeline):
    samples = [Occupancy(0.5, 2, 1, 9), Occupancy(1.5, 0, 0, 0)]
    trace = chrome_trace(timeline, samples, start_s=10.0)
    assert [(event["ts"], event["args"]) for event in events(trace, ph="C", name="pages")] == [
        (0.5e6, {"in use": 9}),
        (1.5e6, {"in use": 0}),
    ]
    assert [event["args"] for event in events(trace, ph="C", name="requests")] == [
        {"running": 2, "waiting": 1},
        {"running": 0, "waiting": 0},
    ]


def test_nothing_observed_is_a_trace_of_named_tracks():
    trace = chrome_trace(observe([]), (), start_s=0.0)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}


def test_work_that_fails_fails_the_timeline_at_its_end():
    def fail(results):
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"), Timeline(wait=fail) as timeline:
        timeline.dispatched(DECODE, None, 0.0)

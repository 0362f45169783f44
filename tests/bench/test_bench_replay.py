"""Replays against an engine of a second a step: who is sent when, and what is written down."""

import numpy as np
import pytest

from jaxinfer.bench.counters import TOTALS, Occupancy
from jaxinfer.bench.replay import Record, replay, warm_up
from jaxinfer.bench.traces import TracedRequest

from .fake_engine import FakeClock, FakeEngine


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def engine(clock):
    return FakeEngine(clock)


def run(engine, clock, requests, **how):
    """The replay of requests whose prompts are of their index alone."""
    prompts = [np.full(one.num_prompt, index) for index, one in enumerate(requests)]
    return replay(engine, requests, prompts, clock=clock, sleep=clock.sleep, **how)


def test_an_open_loop_sends_each_request_when_it_is_due(engine, clock):
    requests = [
        TracedRequest(0.0, 4, 4),
        TracedRequest(1.5, 5, 1),
        TracedRequest(1.75, 6, 1),
        TracedRequest(10.0, 7, 2),
    ]
    result = run(engine, clock, requests)
    # What comes due during a step is sent after it; before the last nothing is left to do.
    assert [time for time, _ in engine.sent] == [100.0, 102.0, 102.0, 110.0]
    assert [request.prompt for _, request in engine.sent] == [[0] * 4, [1] * 5, [2] * 6, [3] * 7]
    assert clock.slept == [6.0]
    assert result.records == (
        Record(4, 4, 0.0, 0.0, (1.0, 2.0, 2.0, 3.0), 3.0),
        Record(5, 1, 1.5, 2.0, (3.0,), 3.0),
        Record(6, 1, 1.75, 3.0, (4.0,), 4.0),
        Record(7, 2, 10.0, 10.0, (11.0, 12.0), 12.0),
    )
    assert (result.start_s, result.duration_s, result.idle_s) == (100.0, 12.0, 6.0)
    assert result.wait_s == pytest.approx(6 * 0.75)
    sums = ("prefill_slots", "decode_slots")
    assert result.counters == dict.fromkeys((*TOTALS, *sums), 0) | {"fetches": 6}


def test_times_of_a_request_follow_from_its_record():
    record = Record(5, 4, 1.5, 2.0, (3.0, 4.0, 4.0, 4.5), 4.5)
    assert (record.queue_s, record.ttft_s, record.tpot_s) == (0.5, 1.5, 0.5)
    assert record.itl_s == (1.0, 0.5), "tokens that come together are one delivery"
    assert record.is_complete
    alone = Record(5, 2, 1.5, 2.0, (3.0,), 4.0)
    assert (alone.tpot_s, alone.itl_s, alone.is_complete) == (None, (), False)
    never = Record(5, 2, 1.5, None, (), 4.0)
    assert (never.queue_s, never.ttft_s, never.tpot_s) == (None, None, None)


def test_requests_end_after_as_many_tokens_as_they_say_whatever_these_are(engine, clock):
    run(engine, clock, [TracedRequest(0.0, 4, 3), TracedRequest(0.0, 4, 6)])
    params = [request.params for _, request in engine.sent]
    assert [one.max_tokens for one in params] == [3, 6]
    assert all(one.ignore_eos and one.temperature == 0 for one in params)


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_a_closed_loop_keeps_as_many_under_way_and_ignores_arrivals(engine, clock, concurrency):
    requests = [TracedRequest(1000.0 * i, 4, 1 + i % 3) for i in range(7)]
    result = run(engine, clock, requests, concurrency=concurrency)
    assert engine.most == concurrency
    assert len(result.records) == 7
    assert (clock.slept, result.idle_s) == ([], 0.0)
    # Only while fewer are left than that may fewer be under way after a step and the next sending.
    sent = [time - 100.0 for time, _ in engine.sent]
    ends = sorted(record.end_s for record in result.records)
    assert sent[:concurrency] == [0.0] * concurrency
    assert sent[concurrency:] == ends[: 7 - concurrency], "one is sent whenever one ends"
    assert sorted(record.arrival_s for record in result.records) == sent


def test_what_is_in_use_is_sampled_after_each_step(engine, clock):
    result = run(engine, clock, [TracedRequest(0.0, 4, n) for n in (1, 3, 1, 1)])
    assert result.samples == (
        Occupancy(1.0, 2, 1, 9),
        Occupancy(2.0, 1, 0, 3),
        Occupancy(3.0, 0, 0, 0),
    )


def test_a_request_cut_short_is_not_complete(engine, clock):
    engine.cut = {(1, 1)}
    result = run(engine, clock, [TracedRequest(0.0, 2, 3), TracedRequest(0.0, 2, 3)])
    assert [(one.is_complete, one.end_s) for one in result.records] == [(False, 1.0), (True, 2.0)]


def test_progress_counts_requests_that_are_over(engine, clock):
    seen = []
    requests = [TracedRequest(0.0, 4, n) for n in (1, 3, 1)]
    run(engine, clock, requests, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (3, 3)]


def test_a_request_that_does_not_fit_is_refused_before_any_is_sent(engine, clock):
    run(engine, clock, [TracedRequest(0.0, 60, 4)])
    requests = [TracedRequest(0.0, 4, 1), TracedRequest(0.0, 60, 5)]
    with pytest.raises(
        ValueError, match="65 tokens.* max_model_len=64 and num_pages=64 leave.* 64"
    ):
        run(engine, clock, requests)
    small = FakeEngine(clock, num_pages=5)
    with pytest.raises(ValueError, match="num_pages=5 leave room for 40. Raise them, or clip"):
        run(small, clock, [TracedRequest(0.0, 40, 1)])
    assert (len(engine.sent), small.sent) == (1, [])
    with pytest.raises(ValueError, match="concurrency=0"):
        run(engine, clock, [TracedRequest(0.0, 4, 1)], concurrency=0)


def test_warm_up_fills_every_row_and_empties_them_one_size_after_the_other(engine):
    warm_up(engine)
    sizes = [(len(request.prompt), request.params.max_tokens) for _, request in engine.sent]
    # max_num_seqs=2, max_window=2: 3 windows and 2, each after a first token.
    assert sizes == [(57, 7), (16, 5)]
    assert engine.most == 2

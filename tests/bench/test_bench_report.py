"""What records come to: percentiles, rates and goodput against numbers worked out by hand."""

import json

import numpy as np
import pytest

from jaxinfer.bench.replay import Record, Replay
from jaxinfer.bench.report import goodput, percentiles, summary, table


def record(arrival_s, *token_times_s, queue_s=0.0, num_output=None):
    """A request of 10 prompt tokens."""
    num_output = num_output or len(token_times_s)
    end_s = token_times_s[-1] if token_times_s else arrival_s
    return Record(10, num_output, arrival_s, arrival_s + queue_s, token_times_s, end_s)


def replay_of(*records, **changes):
    whole = dict(start_s=0.0, duration_s=8.0, idle_s=3.0, wait_s=4.0, counters={}, samples=())
    return Replay(records=records, **{**whole, **changes})


RECORDS = (
    record(0.0, 0.5, 1.5, 2.5),  # TTFT 0.5, TPOT 1
    record(1.0, 1.25, queue_s=0.125),  # TTFT 0.25
    record(2.0, 4.0, 4.0, 4.5, queue_s=0.625),  # TTFT 2, TPOT 0.25
    record(3.0, 3.5, num_output=9),  # cut short
)


def test_percentiles_are_those_of_numpy_in_milliseconds():
    seconds = np.random.default_rng(3).exponential(0.2, 101)
    found = percentiles([None, *seconds, None])
    assert found == {
        "p50": pytest.approx(1e3 * np.median(seconds)),
        "p90": pytest.approx(1e3 * np.percentile(seconds, 90)),
        "p99": pytest.approx(1e3 * np.percentile(seconds, 99)),
    }
    assert percentiles([1.0, 2.0])["p90"] == pytest.approx(1900.0)
    assert percentiles([None]) is None


def test_summary():
    found = summary(replay_of(*RECORDS, counters={"fetches": 7}))
    expected = {
        "num_requests": 4,
        "num_incomplete": 1,
        "prompt_tokens": 40,
        "output_tokens": 8,
        "duration_s": 8.0,
        "idle_s": 3.0,
        "requests_per_s": 0.5,
        "output_tokens_per_s": 1.0,
        "total_tokens_per_s": 6.0,
        "goodput": None,
        "device_share": 0.8,  # 4 of the 5 seconds that had work
        "engine": {"fetches": 7},
    }
    assert {name: found[name] for name in expected} == expected
    assert found.keys() - expected.keys() == {"ttft_ms", "tpot_ms", "itl_ms", "queue_ms"}
    assert found["ttft_ms"]["p50"] == 500.0
    assert found["tpot_ms"]["p50"] == 625.0
    assert found["itl_ms"]["p50"] == 1000.0  # of 1, 1 and 0.5
    assert found["queue_ms"]["p50"] == 62.5
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("slo_ttft", "slo_tpot", "num_good"),
    [
        (0.5, None, 2),  # the one cut short came in time, but not whole
        (0.49, None, 1),
        (2.0, 0.25, 2),  # the request of one token has no TPOT to miss
        (None, 1.0, 3),
        (0.1, 0.1, 0),
    ],
)
def test_goodput_counts_whole_requests_within_both_limits(slo_ttft, slo_tpot, num_good):
    assert goodput(RECORDS, 8.0, slo_ttft, slo_tpot) == {
        "slo_ttft_s": slo_ttft,
        "slo_tpot_s": slo_tpot,
        "share": num_good / 4,
        "requests_per_s": num_good / 8.0,
    }


def test_ratios_follow_from_the_counters_that_are_there():
    counters = {
        "prefill_tokens": 75,
        "prefill_slots": 100,
        "output_tokens": 3,
        "decode_slots": 4,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "preempted": 2,
    }
    found = summary(replay_of(*RECORDS, counters=counters))["engine"]
    # A trace without a prompt token that was admitted has no hit rate.
    assert found == {**counters, "prefill_padding": 0.25, "idle_decode_rows": 0.25}
    counters |= {"prompt_tokens": 50, "cached_tokens": 20}
    assert summary(replay_of(*RECORDS, counters=counters))["engine"]["cache_hit_rate"] == 0.4
    assert "prefill_padding" not in summary(replay_of(*RECORDS))["engine"]


def test_table_says_all_of_it():
    counters = {"prefill_tokens": 75, "prefill_slots": 100}
    found = summary(replay_of(*RECORDS, counters=counters), slo_ttft=0.5, slo_tpot=1.0)
    assert table(found).splitlines() == [
        "requests  4, 1 of them cut short, in 8.00 s: 0.50 per s",
        "tokens    40 in, 8 out: 1.0 out per s, 6.0 in all per s",
        "",
        "ms                p50         p90         p99",
        "TTFT            500.0     1,550.0     1,955.0",
        "TPOT            625.0       925.0       992.5",
        "ITL           1,000.0     1,000.0     1,000.0",
        "queue            62.5       475.0       610.0",
        "",
        "goodput   50.0% of requests, 0.25 per s (TTFT <= 0.5 s, TPOT <= 1 s)",
        "device    busy 80.0% of the time at least, the host the rest; 3.00 s without work",
        "engine    prefill tokens 75",
        "engine    prefill slots 100",
        "engine    prefill padding 25.0%",
    ]


def test_a_latency_that_nothing_has_is_a_dash():
    found = summary(replay_of(record(0.0, 0.5)))
    assert found["tpot_ms"] is None
    assert "TPOT                -           -           -" in table(found).splitlines()

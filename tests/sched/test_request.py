"""What a request knows of itself."""

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request


def running(prompt_len, max_total_len, num_computed, stop_ids=()):
    request = Request(
        id="r",
        prompt_ids=tuple(range(100, 100 + prompt_len)),
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(stop_ids),
    )
    request.max_total_len, request.num_computed = max_total_len, num_computed
    return request


def test_gaps_close_one_token_before_the_end():
    request = running(5, 8, 0)
    assert (request.prefill_gap, request.num_known) == (5, 5)
    request.num_computed = 5
    assert (request.prefill_gap, request.decode_gap) == (0, 2)  # the prefill gave the first of 3
    assert [request.append(1), request.num_known] == [None, 6]
    request.num_computed = 7
    assert request.decode_gap == 0
    assert [request.append(1), request.append(1)] == [None, "length"]


def test_known_ids_span_prompt_and_output():
    request = running(3, 10, 9)
    for token in (7, 8, 9):
        request.append(token)
    everything = [100, 101, 102, 7, 8, 9]
    for start in range(6):
        for length in range(7 - start):
            assert request.known_ids(start, length) == everything[start : start + length]


def test_stop_at_the_limit_is_stop():
    request = running(2, 4, 3, stop_ids=[5])
    assert [request.append(1), request.append(5)] == [None, "stop"]


def test_more_tokens_than_computed_are_refused():
    request = running(2, 9, 2)
    request.append(1)
    with pytest.raises(AssertionError, match="more tokens"):
        request.append(1)

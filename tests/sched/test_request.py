"""What a request knows of itself."""

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Status


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
    assert [request.extend([1]), request.num_known] == [None, 6]
    request.num_computed = 7
    assert request.decode_gap == 0
    assert [request.extend([]), request.extend([1, 1])] == [None, "length"]


def test_known_ids_span_prompt_and_output():
    request = running(3, 10, 9)
    request.extend([7, 8, 9])
    everything = (100, 101, 102, 7, 8, 9)
    for start in range(6):
        for length in range(7 - start):
            assert request.known_ids(start, length) == everything[start : start + length]


def test_stop_at_the_limit_is_stop():
    request = running(2, 4, 3, stop_ids=[5])
    assert request.extend([1, 5]) == "stop"


@pytest.mark.parametrize(
    ("new_ids", "message"), [([5, 1], "after a stop"), ([1, 1, 1], "after the end")]
)
def test_tokens_after_the_end_are_an_error_of_ours(new_ids, message):
    request = running(2, 4, 2, stop_ids=[5])
    with pytest.raises(AssertionError, match=message):
        request.extend(new_ids)


def test_integrity_check_sees_what_does_not_fit_the_status():
    waiting = running(2, 9, 1)
    with pytest.raises(AssertionError, match="waits and has computed"):
        waiting.check_integrity()
    decoding = running(2, 9, 2)
    decoding.row, decoding.status = 0, Status.DECODE
    decoding.check_integrity()
    decoding.extend([1, 1])
    with pytest.raises(AssertionError, match="lost a token"):
        decoding.check_integrity()
    decoding.status = Status.PREFILL
    decoding.under_way.append(1)
    with pytest.raises(AssertionError, match="before all is read"):
        decoding.check_integrity()

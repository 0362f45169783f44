"""Traces as files: both formats, their errors, and lengths and times made smaller."""

import json

import pytest

from jaxinfer.bench.traces import TracedRequest, fixed_trace, read_trace, scale

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-02-28 23:59:59.2500000,300,7
2024-02-29 00:00:01.0000010,12,1

2024-02-29 00:00:00.5000000,40,2
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a text as a file and returns its path."""

    def write(text):
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mooncake(*rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row))) for row in rows)


def test_azure_rows_become_requests_in_order_of_arrival(write):
    first, second, third = read_trace(write(AZURE))
    assert first == TracedRequest(0.0, 300, 7)
    assert (second.num_prompt, third.num_prompt) == (40, 12), "not in order of arrival"
    assert second.arrival_s == pytest.approx(1.25, abs=1e-6), "across midnight"
    assert third.arrival_s == pytest.approx(1.750001, abs=1e-6)
    assert {one.prefix_hashes for one in (first, second, third)} == {None}


def test_azure_columns_are_found_by_name_and_times_may_have_zones(write):
    text = (
        "\ufeffGeneratedTokens,Model,ContextTokens,TIMESTAMP\n"
        "5,a,6,2024-05-10 01:00:00+00:00\n"
        "8,b,9,2024-05-10 02:00:03+01:00\n"
    )
    assert read_trace(write(text)) == (TracedRequest(0.0, 6, 5), TracedRequest(3.0, 9, 8))


def test_mooncake_rows_become_requests(write):
    text = mooncake([500, 513, 9, [3, 44]], [1750, 512, 1, [3]])
    assert read_trace(write(text)) == (
        TracedRequest(0.0, 513, 9, (3, 44), 512),
        TracedRequest(1.25, 512, 1, (3,), 512),
    )


def test_a_priority_may_stand_beside_the_hashes(write):
    row = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [3]}
    assert read_trace(write(json.dumps(row | {"priority": -2})))[0].priority == -2
    assert scale(read_trace(write(json.dumps(row | {"priority": 7}))), divide=2)[0].priority == 7
    with pytest.raises(ValueError, match="priority 0.5 is not an integer"):
        read_trace(write(json.dumps(row | {"priority": 0.5})))


def test_limit_takes_the_first_lines_and_reads_no_further(write):
    assert [one.num_prompt for one in read_trace(write(AZURE), limit=2)] == [300, 12]
    text = mooncake([0, 1, 1, [0]], [0, 2, 1, [0]]) + "\nbroken"
    assert [one.num_prompt for one in read_trace(write(text), limit=2)] == [1, 2]


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = mooncake([0, 600, 2, [5, 6]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "2024-01-01 00:00:00,5,1\n2024-01-01,x,1\n", "line 3: '2024-01-01,x,1' is not"),
        (HEADER + "yesterday,5,1\n", "line 2: .* under its header"),
        (HEADER + "2024-01-01 00:00:00,5\n", "line 2: "),
        (HEADER + "2024-01-01 00:00:00,5,0\n", "0 is not a number of tokens"),
        (GOOD + "\n\n{\n", "line 3: '{' is not an object such as .*Correct or remove the line"),
        (GOOD + "\n[]", "line 2"),
        (mooncake([0, 600, 2, [5]]), "600 tokens have 2 hashes, not 1"),
        (mooncake([0, 6, 2, [-1]]), "hash -1 is not"),
        (mooncake([0, 6, 2, [True]]), "hash True is not"),
        (mooncake([0, 6.5, 2, [1]]), "6.5 is not a number of tokens"),
        (mooncake([None, 6, 2, [1]]), "line 1"),
        (mooncake([0, 6, 2]), "'hash_ids'"),
        ("time,in,out\n1,2,3\n", "line 1: 'time,in,out' begins no known trace. Give a CSV file"),
        ("\n \n", "is empty"),
        (HEADER, "a header alone"),
    ],
)
def test_what_is_not_understood_is_named_with_its_line(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write(text))


def test_fixed_traffic_is_there_at_once():
    assert fixed_trace(8, 3, 2) == (TracedRequest(0.0, 8, 3),) * 2
    with pytest.raises(ValueError, match="OUT=0 must be at least 1"):
        fixed_trace(8, 0, 2)


def test_lengths_are_divided_rounding_up_then_clipped_and_arrivals_sped_up():
    request = TracedRequest(6.0, 100, 33)
    assert scale([request], divide=16) == (TracedRequest(6.0, 7, 3),)
    assert scale([request], divide=16, clip=(6, 9)) == (TracedRequest(6.0, 6, 3),)
    assert scale([request], clip=(200, 1), speedup=4) == (TracedRequest(1.5, 100, 1),)


def test_a_hash_stands_for_fewer_tokens_after_division_and_is_dropped_beyond_the_clip():
    request = TracedRequest(0.0, 1100, 40, (7, 8, 9))
    (divided,) = scale([request], divide=16)
    assert divided == TracedRequest(0.0, 69, 3, (7, 8, 9), 32)
    (clipped,) = scale([request], divide=16, clip=(64, 40))
    assert clipped == TracedRequest(0.0, 64, 3, (7, 8), 32)
    (clipped,) = scale([request], clip=(513, 40))
    assert clipped.prefix_hashes == (7, 8)
    for num_prompt in (1, 511, 512, 513, 1024, 1025):
        hashes = tuple(range(-(-num_prompt // 512)))
        (divided,) = scale([TracedRequest(0.0, num_prompt, 1, hashes)], divide=64)
        assert divided.prefix_hashes == hashes, "as many blocks as before"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"divide": 0}, "divide=0"),
        ({"divide": 3}, "divide=3 does not divide the 512 tokens"),
        ({"clip": (0, 5)}, "1 token in and out"),
        ({"speedup": 0.0}, "speedup=0.0"),
    ],
)
def test_meaningless_scales_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        scale([TracedRequest(0.0, 5, 5, (1,))], **how)

"""Stop strings: found over token edges, never partly streamed, the same streamed and whole."""

import random

import pytest

from jaxinfer.text import StopMatcher


def _stream(stops, deltas):
    """(the pieces given out until a stop, whether one was found)."""
    matcher = StopMatcher(stops)
    out = []
    for delta in deltas:
        text, stopped = matcher.add(delta)
        out.append(text)
        if stopped:
            return out, True
    return [*out, matcher.finish()], False


def _specified(stops, text):
    """The definition, by trying every end: (text before the stop string, whether one was found)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_over_token_edges():
    deltas = ["DEF", "G", "HI", "J"]
    assert _stream("DEFGHIJ", deltas) == (["", "", "", ""], True)
    assert _stream("DEFGHIJ", list("DEFGHIJ")) == ([""] * 7, True)


def test_text_before_the_stop_string_in_the_same_token():
    assert _stream("\n", ["?\n"]) == (["?"], True)
    assert _stream("\n", ["? \nmore"]) == (["? "], True)


def test_one_character():
    assert _stream("a", ["xx", "b", "za", "c"]) == (["xx", "b", "z"], True)
    assert _stream("a", ["xx", "b", "z", "c"]) == (["xx", "b", "z", "c", ""], False)


def test_held_text_comes_out_when_it_turns_out_harmless():
    assert _stream("STOP", ["a ST", "O", "x"]) == (["a ", "", "STOx", ""], False)
    assert _stream("STOP", ["a ST"]) == (["a ", "ST"], False)
    assert _stream("aab", ["aa", "a", "b"]) == (["", "a", ""], True)


def test_the_first_complete_string_wins_and_then_the_longest():
    assert _stream(["b", "abc"], ["xabc"]) == (["xa"], True)
    assert _stream(["abc", "bc"], ["xabc"]) == (["x"], True)


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(["."])
    assert matcher.add("a.b") == ("a", True)
    assert matcher.add("c") == ("", True)
    assert matcher.finish() == ""
    assert matcher.stopped


def test_no_stop_strings():
    assert _stream([], ["a", "b"]) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", ["", ["a", ""], [3]])
def test_empty_stop_strings_are_refused(stops):
    if stops == "":
        stops = [""]
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(stops)


@pytest.mark.parametrize("seed", range(500))
def test_streamed_equals_whole(seed):
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab🔥", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("ab🔥c", k=30))
    deltas, rest = [], text
    while rest:
        n = rng.randint(0, 5)
        deltas.append(rest[:n])
        rest = rest[n:]
    expected = _specified(stops, text)
    for pieces in (deltas, [text], list(text)):
        out, stopped = _stream(stops, pieces)
        assert ("".join(out), stopped) == expected, (stops, text)


def test_long_stop_strings_cost_linear_time():
    stop = "a" * 3000 + "b"
    matcher = StopMatcher(stop)
    for _ in range(20_000):
        matcher.add("a")
    assert matcher.add("b") == ("", True)

"""Stop strings through `LLM`: found across tokens and windows, nothing of them ever shown."""

from __future__ import annotations

import random

import pytest

from .serving import SCRIPT, SCRIPTED
from .texts import SCRIPT_TEXT, sampled


def num_tokens(text: str) -> int:
    """Tokens that the script takes to write `text`: one for each byte."""
    return len(text.encode())


@pytest.mark.parametrize(
    "stop, text",
    [
        ("wör", "a🔥 "),
        ("a🔥 wörld.", ""),
        (["zzz", "ld", "d."], "a🔥 wör"),
        ("🔥", "a"),
        ("a", ""),
        (("rl", "ör"), "a🔥 w"),
    ],
)
def test_the_text_ends_before_it_and_the_tokens_with_it(llm, stop, text):
    params = SCRIPTED.replace(max_tokens=14, stop=stop)
    (output,) = llm.generate("hi", params)
    (completion,) = output.outputs
    found = next(s for s in ([stop] if isinstance(stop, str) else stop) if text + s in SCRIPT_TEXT)
    assert completion.text == text
    assert completion.token_ids == SCRIPT[: num_tokens(text + found)]
    assert completion.finish_reason == "stop"
    streamed = list(llm.stream("hi", params))
    assert "".join(o.outputs[0].text_delta for o in streamed) == text
    assert streamed[-1].outputs == completion_of(output, streamed[-1])


def completion_of(output, last):
    """The output's completion with the delta of the stream's last one."""
    (completion,), (streamed,) = output.outputs, last.outputs
    return (type(completion)(**{**vars(completion), "text_delta": streamed.text_delta}),)


@pytest.mark.parametrize("stop", ["q", "wörm", "ld.?"])
def test_text_that_only_began_like_one_is_given_out(llm, stop):
    params = SCRIPTED.replace(max_tokens=num_tokens(SCRIPT_TEXT))
    (plain,), (output,) = llm.generate("hi", params), llm.generate("hi", params.replace(stop=stop))
    assert output.outputs == plain.outputs
    assert output.outputs[0].text == SCRIPT_TEXT


def test_none_is_sought_before_min_tokens(llm):
    params = SCRIPTED.replace(max_tokens=14, stop=["a", "ld"], min_tokens=2)
    (output,) = llm.generate("hi", params)
    assert output.outputs[0].text == "a🔥 wör"


def test_random_stop_strings_streamed_and_whole_and_together_agree(llm):
    rng = random.Random(0)
    cases = []
    for seed in range(40):
        stops = ["".join(rng.choices("abcdefghij \n.e", k=rng.randint(1, 2))) for _ in range(3)]
        cases.append(sampled(max_tokens=24, seed=seed, stop=stops))
    together = llm.generate(["the same prompt"] * len(cases), cases)
    assert {o.outputs[0].finish_reason for o in together} == {"stop", "length"}
    for params, output in zip(cases, together, strict=True):
        streamed = [o.outputs[0] for o in llm.stream("the same prompt", params)]
        assert "".join(o.text_delta for o in streamed) == output.outputs[0].text
        assert streamed[-1].token_ids == output.outputs[0].token_ids
        (plain,) = llm.generate("the same prompt", params.replace(stop=None))
        assert plain.outputs[0].text.startswith(output.outputs[0].text)
        for stop in params.stop:
            assert stop not in output.outputs[0].text


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5])
def test_what_is_no_stop_string_is_refused(stop):
    with pytest.raises((ValueError, TypeError), match=r"SamplingParams\.stop"):
        sampled(stop=stop)

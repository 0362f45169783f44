"""Log-probabilities and scores through `LLM`."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from .serving import SCRIPT, SCRIPTED
from .texts import BOS, assert_idle, sampled

TEXT = "some text to be scored"


def test_outputs_have_those_that_were_asked_for(llm):
    params = sampled(logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("hi", params)
    (completion,) = output.outputs
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    assert all(len(entry.top) == 3 for entry in completion.logprobs)
    first, *others = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in others] == list(output.prompt_token_ids[1:])
    assert all(len(entry.top) == 2 for entry in others)
    assert max(max(entry.top) for entry in [*completion.logprobs, *others]) < 261, "padding"
    json.dumps([entry.top for entry in completion.logprobs], allow_nan=False)
    (plain,) = llm.generate("hi", sampled())
    assert plain.outputs[0].logprobs is None
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].token_ids == completion.token_ids


def test_a_stream_has_those_of_its_tokens_and_at_once_those_of_the_prompt(llm):
    params = SCRIPTED.replace(max_tokens=9, logprobs=1, prompt_logprobs=0)
    (whole,) = llm.generate("x" * 80, params)
    for output in llm.stream("x" * 80, params):
        (completion,) = output.outputs
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs == whole.outputs[0].logprobs[: len(completion.token_ids)]
        assert output.prompt_logprobs == whole.prompt_logprobs
        assert len(output.prompt_logprobs) == 81


@pytest.mark.parametrize("stop, num_tokens", [("wör", 10), ("a", 1), ("🔥", 5)])
def test_a_stop_string_cuts_them_with_the_tokens(llm, stop, num_tokens):
    params = SCRIPTED.replace(max_tokens=14, stop=stop, logprobs=0)
    (output,) = llm.generate("hi", params)
    (completion,) = output.outputs
    assert completion.token_ids == SCRIPT[:num_tokens]
    assert [entry.token_id for entry in completion.logprobs] == list(SCRIPT[:num_tokens])
    *_, last = llm.stream("hi", params)
    assert last.outputs[0].logprobs == completion.logprobs


def test_a_score_is_what_the_prompt_log_probabilities_say(llm):
    ids = llm.tokenizer.encode(TEXT)
    assert ids[0] == BOS
    scores = llm.score(ids)
    assert (scores.dtype, scores.shape) == (np.float32, (len(ids) - 1,))
    params = sampled(prompt_logprobs=5, temperature=1.5, presence_penalty=2.0)
    (output,) = llm.generate([ids], params)
    wanted = [entry.logprob for entry in output.prompt_logprobs[1:]]
    np.testing.assert_allclose(scores, wanted, atol=1e-5, rtol=0)
    assert (scores < 0).all()
    for same in (TEXT, tuple(ids), np.array(ids)):
        np.testing.assert_array_equal(llm.score(same), scores)


def test_one_prompt_gives_an_array_and_several_give_a_list(llm):
    alone = llm.score(TEXT)
    several = llm.score([TEXT, llm.tokenizer.encode("ab"), "x" * 150])
    assert [len(scores) for scores in several] == [len(TEXT), 2, 150]
    np.testing.assert_allclose(several[0], alone, atol=1e-5, rtol=0)
    assert llm.score([]) == []
    (only,) = llm.score([TEXT])
    np.testing.assert_array_equal(only, alone)


def test_what_was_generated_scores_as_it_did_then(llm):
    (output,) = llm.generate(TEXT, sampled(logprobs=0, max_tokens=12))
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    wanted = [entry.logprob for entry in output.outputs[0].logprobs]
    np.testing.assert_allclose(llm.score(ids)[len(TEXT) :], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "prompts, match",
    [
        ([BOS], "Prompt 0: score is given 1 tokens and needs at least 2"),
        ("", "Prompt 0: score is given 1 tokens and needs at least 2"),
        ([TEXT, [7]], "Prompt 1: score is given 1 tokens"),
        ([5, 261], "Prompt 0: .* token id 261"),
        ("x" * 256, "Prompt 0: .* max_model_len=256"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_is_left(llm, prompts, match):
    with pytest.raises(ValueError, match=match):
        llm.score(prompts)
    assert_idle(llm)
    assert len(llm.score(TEXT)) == len(TEXT)


def test_a_closed_stream_leaves_nothing_behind(llm):
    params = SCRIPTED.replace(max_tokens=40, logprobs=5, prompt_logprobs=5)
    with contextlib.closing(llm.stream("x" * 70, params)) as stream:
        next(stream)
    assert_idle(llm)
    assert list(stream) == []


def test_the_most_that_may_be_asked_for_is_an_option(llm, make_llm):
    with pytest.raises(ValueError, match="Prompt 0: .*logprobs=21, more than max_logprobs=20"):
        llm.generate("hi", sampled(logprobs=21))
    with pytest.raises(ValueError, match="more than max_logprobs=2"):
        make_llm(max_logprobs=2).generate("hi", sampled(logprobs=3))

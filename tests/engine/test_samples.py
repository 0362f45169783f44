"""n samples of a prompt: computed once, each drawn as if it were alone."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer import SamplingParams
from jaxinfer.compute import make_sampling_state

from .serving import CONFIG, EOS, GREEDY, V, drain, note_chunks, prompt_of, result, results
from .texts import assert_idle

SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 7, 8, 16, 21])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_equals_a_whole_recomputation_with_its_index(engine, oracle, length, n):
    """On a page edge and off it: the page that is written on is each sample's own."""
    prompt = prompt_of(length)
    samples = engine.add_samples(prompt, SAMPLED.replace(n=n))
    drain(engine)
    assert results(samples) == [oracle(prompt, SAMPLED, sample_index=i) for i in range(n)]
    assert len({tuple(sample.output_ids) for sample in samples}) == n


def test_the_prompt_is_computed_once(make_engine):
    engine = make_engine()
    lengths, prompt = note_chunks(engine), prompt_of(50)
    engine.add_samples(prompt, SAMPLED.replace(n=3))
    drain(engine)
    assert sum(lengths) == len(prompt)


def test_more_samples_than_rows_among_other_requests(engine, alone, oracle):
    prompt, n = prompt_of(13), CONFIG.max_num_seqs + 5
    before = engine.add_request(prompt_of(30), GREEDY)
    samples = engine.add_samples(prompt, SAMPLED.replace(n=n))
    after = engine.add_request(prompt_of(9), GREEDY)
    drain(engine)
    assert results(samples) == [oracle(prompt, SAMPLED, sample_index=i) for i in range(n)]
    assert result(before) == alone(prompt_of(30), GREEDY)
    assert result(after) == alone(prompt_of(9), GREEDY)


def test_one_may_leave_and_the_others_go_on(engine, oracle):
    prompt = prompt_of(11)
    wanted = [oracle(prompt, SAMPLED, sample_index=i) for i in range(4)]
    for gone in range(4):
        for step in range(4):
            samples = engine.add_samples(prompt, SAMPLED.replace(n=4))
            for _ in range(step):
                engine.step()
            engine.cancel(samples[gone].id)
            drain(engine)
            assert samples[gone].finish_reason == "cancelled"
            for i in set(range(4)) - {gone}:
                assert result(samples[i]) == wanted[i]


def test_log_probabilities_come_with_each_and_those_of_the_prompt_with_the_first(engine):
    params = SAMPLED.replace(n=3, logprobs=2, prompt_logprobs=1)
    prompt = prompt_of(20)
    samples = engine.add_samples(prompt, params)
    drain(engine)
    assert [len(sample.prompt_logprobs) for sample in samples] == [20, 0, 0]
    for sample in samples:
        assert [one.token_id for one in sample.logprobs] == sample.output_ids
        assert [len(one.top) for one in sample.logprobs] == [2] * 10
    # The first tokens come from one distribution.
    for sample in samples[1:]:
        assert sample.logprobs[0].top == pytest.approx(samples[0].logprobs[0].top, abs=1e-5)


def test_refused_where_one_request_is_meant(engine):
    with pytest.raises(ValueError, match=r"n=2 asks for several requests. Use add_samples."):
        engine.add_request([5], GREEDY.replace(n=2))
    engine.add_request([5], GREEDY, request_id="a.1")
    with pytest.raises(ValueError, match=r"Request 'a.1' was added before"):
        engine.add_samples([5], GREEDY.replace(n=2), request_id="a")
    assert engine.scheduler.num_waiting == 1
    drain(engine)


def test_texts_of_all_samples(llm):
    params = SAMPLED.replace(n=3, max_tokens=8)
    (output,) = llm.generate("hello", params)
    assert len(output.outputs) == 3
    alone_ = [
        llm.generate("hello", params.replace(n=1))[0].outputs[0],
        *llm.generate("hello", params)[0].outputs[1:],
    ]
    assert [one.text for one in output.outputs] == [one.text for one in alone_]
    streamed = list(llm.stream("hello", params))
    for j in range(3):
        deltas = [step.outputs[j].text_delta for step in streamed]
        assert "".join(deltas) == output.outputs[j].text
    assert streamed[-1].outputs[2].token_ids == output.outputs[2].token_ids
    assert output.metrics.ttft_s is not None and output.metrics.ttft_s <= output.metrics.total_s
    assert_idle(llm)


def test_closing_a_stream_ends_every_sample(llm):
    stream = llm.stream("hello", SAMPLED.replace(n=4, max_tokens=100))
    next(stream)
    stream.close()
    assert_idle(llm)


def test_sample_indices_draw_different_noise():
    states = [
        make_sampling_state([SAMPLED], [[1, 2]], vocab_size=V, eos_ids=[EOS], sample_index=i)
        for i in range(3)
    ]
    assert len({state.key_B2.tobytes() for state in states}) == 3
    same = dataclasses.replace(states[1], key_B2=states[0].key_B2)
    assert all((a == b).all() for a, b in zip(vars(same).values(), vars(states[0]).values()))

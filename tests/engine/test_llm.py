"""Text in, text out: a tiny checkpoint with a byte tokenizer, through every entry point."""

from __future__ import annotations

import contextlib
import gc

import pytest

from jaxinfer.engine.engine import TokenOutput
from jaxinfer.text import tokenizer_from_json

from .serving import EOS, SCRIPT, SCRIPTED, result, run
from .texts import BOS, IM_END, SCRIPT_TEXT, assert_idle, byte_tokenizer, sampled


def test_generate_gives_text_and_what_went_into_it(llm):
    (output,) = llm.generate("hi", SCRIPTED.replace(max_tokens=14, seed=7))
    (completion,) = output.outputs
    assert completion.token_ids == SCRIPT[:14]
    assert completion.text.startswith(SCRIPT_TEXT)
    assert completion.finish_reason == "length"
    assert output.prompt == "hi"
    assert list(output.prompt_token_ids) == llm.tokenizer.encode("hi")
    assert output.prompt_token_ids[0] == BOS
    assert (output.seed, output.cached_tokens) == (7, 0)
    metrics = output.metrics
    assert 0 <= metrics.queue_s < metrics.ttft_s < metrics.total_s
    assert metrics.tpot_s == pytest.approx((metrics.total_s - metrics.ttft_s) / 13)


def test_text_and_its_ids_ask_the_same(llm, make_engine):
    params = sampled()
    ids = llm.tokenizer.encode("some text")
    by_text, by_ids = llm.generate(["some text", ids], params)
    assert by_text.outputs == by_ids.outputs
    assert by_ids.prompt is None
    engine = make_engine(num_valid_ids=llm.tokenizer.vocab_size, eos_ids=[EOS, IM_END])
    (request,) = run(engine, [(ids, params)])
    assert result(request) == (list(by_text.outputs[0].token_ids), by_text.outputs[0].finish_reason)


def test_one_prompt_or_many_one_params_or_one_each(llm):
    ids = llm.tokenizer.encode("b")
    each = [SCRIPTED.replace(max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate(["a", ids, "c"], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    assert [o.prompt for o in outputs] == ["a", None, "c"]
    assert len(llm.generate(ids, each[0])) == 1
    assert len(llm.generate("a")[0].outputs[0].token_ids) <= 16
    assert llm.generate([], each[0]) == []
    with pytest.raises(ValueError, match="2 SamplingParams were given for 3 prompts"):
        llm.generate(["a", "b", "c"], each[:2])


def test_prompts_of_lower_priority_go_first_where_the_policy_heeds_it(make_llm):
    prompts = [[BOS, *range(10 + i, 69 + i)] for i in range(7)]
    priorities = [5, 1, 4, 0, 6, 2, 3]
    params = sampled(max_tokens=2, ignore_eos=True)
    for policy, order in (("fcfs", [0, 1, 2, 3, 4, 5, 6]), ("priority", [3, 1, 5, 6, 2, 0, 4])):
        llm = make_llm(policy=policy, prefix_cache=False)
        step, firsts = llm._engine.step, []

        def recorded(step=step, firsts=firsts):
            outputs = step()
            firsts += [o.request for o in outputs if len(o.request.output_ids) == len(o.new_ids)]
            return outputs

        llm._engine.step = recorded
        outputs = llm.generate(prompts, params, priority=priorities)
        assert [prompts.index(list(request.prompt_ids)) for request in firsts] == order
        assert [output.prompt_token_ids for output in outputs] == [*map(tuple, prompts)]
    assert llm.stream("hi", priority=-1)._answer.requests[0].priority == -1
    with pytest.raises(ValueError, match="2 priorities were given for 7 prompts"):
        llm.generate(prompts, params, priority=[1, 2])


def test_a_stream_grows_to_what_generate_gives(llm):
    params = SCRIPTED.replace(max_tokens=13)
    (whole,) = llm.generate("hi", params)
    outputs = list(llm.stream("hi", params))
    assert len(outputs) == 5, "one of the prefill, one beside it, windows of 4, 4 and 3"
    text = ""
    for output in outputs:
        (completion,) = output.outputs
        text += completion.text_delta
        assert completion.text == text
        assert "\ufffd" not in completion.text_delta, "a part of a character was shown"
    assert text == whole.outputs[0].text == SCRIPT_TEXT
    assert [o.outputs[0].finish_reason for o in outputs] == [None] * 4 + ["length"]
    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_character_that_never_ends_is_shown_at_the_end(llm):
    """The output stops after two of the emoji's four bytes."""
    (whole,) = llm.generate("hi", SCRIPTED.replace(max_tokens=3))
    assert whole.outputs[0].text == "a\ufffd"
    deltas = [o.outputs[0].text_delta for o in llm.stream("hi", SCRIPTED.replace(max_tokens=3))]
    assert deltas == ["a", "", "\ufffd"]


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(llm):
    params = SCRIPTED.replace(max_tokens=13, stop_token_ids=[SCRIPT[6]])
    (whole,) = llm.generate("hi", params)
    assert whole.outputs[0].token_ids == SCRIPT[:7]
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("a🔥 ", "stop")
    outputs = list(llm.stream("hi", params))
    assert "".join(o.outputs[0].text_delta for o in outputs) == "a🔥 "
    assert outputs[-1].outputs[0].token_ids == SCRIPT[:7]
    assert outputs[-1].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("eos", [EOS, IM_END])
def test_end_of_text_and_end_of_turn_both_stop(llm, eos):
    params = sampled(temperature=0.0, logit_bias={eos: 1e3}, min_tokens=2)
    (output,) = llm.generate("hi", params)
    assert output.outputs[0].token_ids[2:] == (eos,)
    assert output.outputs[0].finish_reason == "stop"
    assert "<" not in output.outputs[0].text


def test_only_ids_of_the_tokenizer_are_produced(llm):
    """The head has 1000 columns; all are equally likely at this temperature, but for the filter."""
    (output,) = llm.generate("hi", sampled(temperature=1e6, max_tokens=100, ignore_eos=True))
    assert max(output.outputs[0].token_ids) < llm.tokenizer.vocab_size == 261


def test_chat_is_the_template_and_then_generate(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    params = sampled()
    (answer,) = llm.chat(messages, params)
    ids = list(answer.prompt_token_ids)
    assert ids.count(BOS) == 1
    assert llm.tokenizer.decode(ids, skip_special=False) == "<s>" + text
    (same,) = llm.generate(ids, params)
    assert answer.outputs == same.outputs
    streamed = list(llm.stream_chat(messages, params))
    assert streamed[-1].prompt_token_ids == answer.prompt_token_ids
    assert streamed[-1].outputs[0].token_ids == same.outputs[0].token_ids
    assert "".join(o.outputs[0].text_delta for o in streamed) == same.outputs[0].text
    several = llm.chat([messages, [{"role": "user", "content": "ho"}]], params)
    assert several[0].outputs == answer.outputs
    assert several[1].prompt_token_ids != answer.prompt_token_ids


@pytest.mark.parametrize(
    "prompt, ids", [("", [BOS]), ([], [BOS]), ([BOS], [BOS]), (" ", [BOS, SCRIPT[5]])]
)
def test_prompts_of_next_to_nothing_have_a_defined_result(llm, prompt, ids):
    wanted = llm.generate([ids], sampled())[0]
    (output,) = llm.generate([prompt], sampled())
    assert list(output.prompt_token_ids) == ids
    assert output.outputs == wanted.outputs
    if prompt == "":
        assert llm.generate("", sampled())[0].outputs == wanted.outputs


def test_nothing_at_all_is_refused_where_no_token_begins_a_text(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", tokenizer_from_json(byte_tokenizer(), {}))
    for prompts in ("", [""], [[]]):
        with pytest.raises(ValueError, match="Prompt 0: .* empty prompt"):
            llm.generate(prompts, sampled())
    assert len(llm.generate(" ", sampled())) == 1


@pytest.mark.parametrize(
    "bad, match",
    [
        ([5, 261], r"Prompt 1: .* token id 261; the model has ids 0\.\.260"),
        ([-1], "Prompt 1: .* token id -1"),
        ("x" * 300, "Prompt 1: .* max_model_len=256"),
        ("x" * 200, "Prompt 1: .* pages"),
        ("\ud800", "Prompt 1: .* lone surrogate"),
        ([[]], "Prompt 1: .* not a list of integer token ids"),
        ([1.5], "Prompt 1: .* not a list of integer token ids"),
    ],
)
def test_a_bad_prompt_among_good_ones_is_named_and_nothing_is_left(llm, bad, match):
    with pytest.raises(ValueError, match=match):
        llm.generate(["one", bad, "three"], sampled())
    assert_idle(llm)
    assert len(llm.generate("one", sampled())) == 1


def test_a_bad_conversation_or_bad_params_are_named_too(llm):
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="Prompt 1: "):
        llm.chat([good, [{"role": "user"}]], sampled())
    with pytest.raises(ValueError, match="Prompt 1: .*stop_token_ids holds token id 900"):
        llm.generate(["a", "b"], [sampled(), sampled(stop_token_ids=[900])])
    assert_idle(llm)


def test_bad_words_may_be_text(llm):
    params = SCRIPTED.replace(max_tokens=8)
    plain, no_w, no_pair, other = llm.generate(
        ["hi"] * 4,
        [
            params,
            params.replace(bad_words=["w"]),
            params.replace(bad_words=[" w"]),
            params.replace(bad_words=["xw"]),
        ],
    )
    assert plain.outputs[0].token_ids == other.outputs[0].token_ids == SCRIPT[:8]
    for output in (no_w, no_pair):
        ids = output.outputs[0].token_ids
        assert ids[6] != SCRIPT[6]
        assert ids[:6] + ids[7:] == SCRIPT[:6] + SCRIPT[7:8]


def test_streams_take_turns_and_let_others_in(llm):
    params = [sampled(seed=n, max_tokens=20) for n in range(3)]
    wanted = [o.outputs[0].token_ids for o in llm.generate(["a", "b", "c"], params)]
    first, second = llm.stream("a", params[0]), llm.stream("b", params[1])
    last = {}
    for stream, output in zip([first, second] * 2, [next(first), next(second)] * 2):
        last[stream] = output
    (third,) = llm.generate("c", params[2])
    assert third.outputs[0].token_ids == wanted[2]
    rest = [list(first), list(second)]
    assert [outputs[-1].outputs[0].token_ids for outputs in rest] == wanted[:2]


def test_closing_a_stream_cancels_its_request(llm):
    params = SCRIPTED.replace(max_tokens=40)
    with contextlib.closing(llm.stream("hi", params)) as stream:
        assert next(stream).outputs[0].token_ids == SCRIPT[:1]
        assert llm._engine.has_work
    assert_idle(llm)
    assert list(stream) == []
    dropped = llm.stream("hi", params)
    next(dropped)
    del dropped
    gc.collect()
    assert_idle(llm)
    llm.stream("never read", params).close()


def test_whatever_interrupts_generate_leaves_nothing_behind(make_llm):
    class Stop(Exception):
        pass

    def progress(what, done, total):
        seen.append((what, done, total))
        if what == "generating" and done:
            raise Stop

    seen = []
    llm = make_llm(progress=progress)
    with pytest.raises(Stop):
        llm.generate(["a", "b"], [SCRIPTED.replace(max_tokens=n) for n in (2, 40)])
    assert seen[-1] == ("generating", 1, 2)
    assert "loading" in {what for what, _, _ in seen}
    assert_idle(llm)


def test_closing_ends_streams_as_cancelled(make_llm):
    with make_llm() as llm:
        stream = llm.stream("hi", SCRIPTED.replace(max_tokens=40))
        next(stream)
    assert_idle(llm)
    assert stream._answer.requests[0].finish_reason == "cancelled"
    assert list(stream) == []


def test_no_seed_gives_another_one_each_time_and_reports_it(llm):
    params = sampled(seed=None, temperature=1e6)
    one, other = llm.generate(["hi"] * 2, params)
    assert one.seed != other.seed
    assert one.outputs[0].token_ids != other.outputs[0].token_ids
    (again,) = llm.generate("hi", params.replace(seed=one.seed))
    assert again.outputs == one.outputs


def test_tokens_left_by_an_interrupted_step_do_not_disturb_what_comes_after(llm):
    stream = llm.stream("hi", SCRIPTED)
    next(stream)
    llm._engine._ready.append(TokenOutput(stream._answer.requests[0], (SCRIPT[1],), None))
    stream.close()
    (output,) = llm.generate("hi", SCRIPTED.replace(max_tokens=3))
    assert output.outputs[0].token_ids == SCRIPT[:3]

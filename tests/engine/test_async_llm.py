"""Streams of `AsyncLLM`: what `LLM` gives, to any number of tasks, loops and threads."""

from __future__ import annotations

import asyncio
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.frontend import SCORING
from jaxinfer.text import tokenizer_from_json

from .serving import EOS, SCRIPT, SCRIPTED
from .streaming import (
    ENDLESS,
    JOBS,
    LONG,
    held,
    patient,
    read,
    read_all,
    results,
    run,
    settle,
    wanted,
)
from .texts import BOS, SCRIPT_TEXT, byte_tokenizer, sampled

MESSAGES = [{"role": "user", "content": "hi"}]


def test_requests_together_give_what_llm_gives(async_llm, llm):
    async def main():
        return await read_all([async_llm.generate(*job) for job in JOBS])

    streamed = run(main())
    assert results(outputs[-1] for outputs in streamed) == wanted(llm, JOBS)
    assert any(len(outputs) > 3 for outputs in streamed)
    for outputs in streamed:
        assert all(one.finish_reason for one in outputs[-1].outputs)
        lengths = [sum(len(one.token_ids) for one in output.outputs) for output in outputs]
        assert lengths == sorted(lengths)
    why = JOBS.index(("why", JOBS[5][1]))
    (plain,) = llm.generate(*JOBS[why])
    for found, same in (
        (streamed[why][-1].prompt_logprobs[1:], plain.prompt_logprobs[1:]),
        (streamed[why][-1].outputs[0].logprobs, plain.outputs[0].logprobs),
    ):
        logprobs = [one.logprob for one in found]
        np.testing.assert_allclose(logprobs, [one.logprob for one in same], atol=1e-5, rtol=0)


def test_a_reader_who_keeps_up_sees_every_step(async_llm):
    async def main():
        return await read(async_llm.generate("hi", SCRIPTED.replace(max_tokens=13)))

    with patient(async_llm):
        outputs = run(main())
    assert outputs[-1].outputs[0].text == SCRIPT_TEXT
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 6, 10, 13]
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * 4 + ["length"]
    metrics = outputs[-1].metrics
    assert 0 <= metrics.queue_s < metrics.ttft_s < metrics.total_s


def test_chat_is_llms_chat(async_llm, llm):
    params = sampled(max_tokens=6)

    async def main():
        return await read_all(
            [
                async_llm.chat(MESSAGES, params),
                async_llm.chat(MESSAGES, params, add_generation_prompt=False),
            ]
        )

    first, second = run(main())
    assert results([first[-1]]) == results(llm.chat(MESSAGES, params))
    other = llm.chat(MESSAGES, params, add_generation_prompt=False)
    assert results([second[-1]]) == results(other)


def test_scores_are_llms_scores(async_llm, llm):
    texts = ["some text to be scored", "x" * 150, [BOS, 9, 8, 7]]

    async def main():
        scores = await asyncio.gather(*map(async_llm.score, texts))
        for bad, match in (
            ([BOS], "given 1 tokens and needs at least 2"),
            ([[1, 2], [3, 4]], "not a list"),
        ):
            with pytest.raises(ValueError, match=match):
                await async_llm.score(bad)
        return scores

    for found, same in zip(run(main()), llm.score(texts), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, same, atol=1e-5, rtol=0)


def test_a_score_is_there_where_the_model_would_end(async_llm, llm, monkeypatch):
    ending = SCORING.replace(logit_bias={EOS: 1e3})
    monkeypatch.setattr("jaxinfer.engine.async_llm.SCORING", ending)
    found, same = run(async_llm.score("some text")), llm.score("some text")
    np.testing.assert_allclose(found, same, atol=1e-5, rtol=0)


def test_one_event_loop_after_the_other(async_llm, llm):
    async def begin():
        stream = async_llm.generate(*JOBS[3])
        return stream, await anext(stream)

    async def go_on(stream, first):
        outputs = [first, *[output async for output in stream]]
        return "".join(output.outputs[0].text_delta for output in outputs), outputs[-1]

    with patient(async_llm):
        stream, first = run(begin())
        assert first.outputs[0].finish_reason is None
        text, last = run(go_on(stream, first))
    assert results([last]) == wanted(llm, [JOBS[3]])
    assert text == last.outputs[0].text
    assert results(outputs[-1] for outputs in run(read_all([async_llm.generate(*JOBS[0])]))) == (
        wanted(llm, [JOBS[0]])
    )


def test_loops_of_several_threads_at_once(async_llm, llm):
    found = {}

    def serve(n):
        found[n] = run(read(async_llm.generate(*JOBS[n])))[-1]

    threads = [threading.Thread(target=serve, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert results(found[n] for n in range(6)) == wanted(llm, JOBS[:6])


def test_a_slow_reader_gets_all_since_its_last_look_and_stalls_nobody(async_llm, monkeypatch):
    params = SCRIPTED.replace(max_tokens=30)

    async def main():
        slow = async_llm.generate("slow", params)
        other = await read(async_llm.generate("other", params.replace(max_tokens=40)))
        # Its 40 tokens came in no fewer steps than the 30 of the slow one.
        assert slow._delivery.is_over
        loop, calls = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
        blocked = async_llm.generate("blocked", params)
        deadline = time.monotonic() + LONG
        while not blocked._delivery.is_over and time.monotonic() < deadline:
            time.sleep(0.001)  # the loop itself is busy
        assert calls == [], "a loop where nobody waits was called"
        monkeypatch.undo()
        return await read(slow), await read(blocked), other

    late, at_once, other = run(main())
    for outputs in (late, at_once):
        (output,) = outputs
        (completion,) = output.outputs
        assert completion.token_ids == SCRIPT[:30]
        assert completion.text_delta == completion.text
    assert len(other[-1].outputs[0].token_ids) == 40


@pytest.mark.parametrize(
    "prompt, fields, match",
    [
        ([5, 261], {}, r"token id 261; the model has ids 0\.\.260"),
        ([-1], {}, "token id -1"),
        ("x" * 300, {}, "max_model_len=256"),
        ("x" * 200, {"max_tokens": 30}, "pages"),
        ("\ud800", {}, "lone surrogate"),
        ([[]], {}, "not a list of integer token ids"),
        ([1.5], {}, "not a list of integer token ids"),
        ("hi", {"logprobs": 21}, "more than max_logprobs=20"),
        ("hi", {"stop_token_ids": [900]}, "stop_token_ids holds token id 900"),
        ("hi", {"temperature": float("nan")}, "temperature"),
        ("hi", {"top_k": -2}, "top_k"),
    ],
)
def test_what_cannot_run_is_refused_where_it_is_asked(async_llm, llm, prompt, fields, match):
    async def main():
        good = async_llm.generate(*JOBS[0])
        with pytest.raises(ValueError, match=match):
            async_llm.generate(prompt, sampled(**fields))
        return [outputs[-1] for outputs in await read_all([good, async_llm.generate(*JOBS[2])])]

    assert results(run(main())) == wanted(llm, [JOBS[0], JOBS[2]])


def test_bad_conversations_and_empty_prompts(async_llm, llm, monkeypatch):
    async def main():
        with pytest.raises(ValueError):
            async_llm.chat([{"role": "user"}])
        with monkeypatch.context() as patch:
            patch.setattr(async_llm, "tokenizer", tokenizer_from_json(byte_tokenizer(), {}))
            for prompt in ("", []):
                with pytest.raises(ValueError, match="empty prompt"):
                    async_llm.generate(prompt)
        jobs = [(prompt, sampled()) for prompt in ("", [], " ", [BOS])]
        outputs = await read_all([async_llm.generate(*job) for job in jobs])
        assert results(o[-1] for o in outputs) == wanted(llm, jobs)

    run(main())


def test_a_name_is_of_one_request_at_a_time(async_llm):
    async def main():
        with held(async_llm):
            stream = async_llm.generate("hi", ENDLESS.replace(n=3), request_id="a")
            for taken in ("a", "a.2"):
                with pytest.raises(ValueError, match=f"Request {taken!r} was added before"):
                    async_llm.generate("ho", request_id=taken)
        await stream.aclose()
        await settle(async_llm)
        again = await read(async_llm.generate("hi", sampled(), request_id="a"))
        assert again[-1].request_id == "a"

    run(main())


def test_a_priority_reaches_the_engine(async_llm):
    async def main():
        stream = async_llm.generate("hi", sampled(max_tokens=1), priority=-3)
        assert stream._delivery.answer.requests[0].priority == -3
        chat = async_llm.chat(MESSAGES, sampled(max_tokens=1), priority=4, request_id="b")
        assert chat._delivery.answer.requests[0].priority == 4
        await read_all([stream, chat])

    run(main())


def test_the_counters_are_read_between_two_steps(async_llm):
    async def main():
        before = await async_llm.metrics()
        stream = async_llm.generate("hi", ENDLESS)
        await anext(stream)
        during = await async_llm.metrics()
        await read_rest(stream)
        return before, during, await async_llm.metrics()

    before, during, after = run(main())
    assert during["num_running"] == 1 and during["pages_held"] >= 1
    assert (after["num_running"], after["pages_held"]) == (0, 0)
    assert after["output_tokens"] - before["output_tokens"] == ENDLESS.max_tokens
    for found in (before, during, after):
        pages = found["pages_held"] + found["pages_cached"] + found["pages_free"]
        assert pages == found["pages_total"]
        assert found["load_s"] > 0


def test_new_weights_come_between_two_steps(async_llm, llm, wide):
    greedy = sampled(temperature=0.0, max_tokens=60, ignore_eos=True)
    head = {"head": {"weight": wide.params["head"]["weight"][::-1]}}
    other, half = wide.params | head, jax.tree.map(jnp.bfloat16, wide.params)
    old = wanted(llm, [("hi", greedy)])

    async def main():
        stream = async_llm.generate("hi", greedy)
        first = await anext(stream)
        await async_llm.update_params(other)
        last = (await read_rest(stream))[-1]
        with pytest.raises(ValueError, match="Keep shape, dtype"):
            await async_llm.update_params(half)
        new = (await read(async_llm.generate("hi", greedy)))[-1]
        await async_llm.update_params(wide.params)
        again = (await read(async_llm.generate("hi", greedy)))[-1]
        return first.outputs[0].token_ids, last.outputs[0].token_ids, new, again

    with patient(async_llm):
        first, last, new, again = run(main())
    (_, _, [(old_ids, *_)]) = old[0]
    same = [a == b for a, b in zip(old_ids, last)]
    assert len(last) == 60 and last[: len(first)] == first
    assert False in same and same.index(False) >= len(first), "old tokens, then new ones"
    assert results([again]) == old
    assert (new.cached_tokens, again.cached_tokens) == (0, 0)
    llm.update_params(other)
    assert results([new]) == wanted(llm, [("hi", greedy)])
    llm.update_params(wide.params)


async def read_rest(stream):
    return [output async for output in stream]


def test_no_more_may_wait_than_max_waiting(make_async_llm):
    async def main():
        async with make_async_llm(max_waiting=2) as llm:
            with held(llm):
                streams = [llm.generate("hi", sampled(n=5)), llm.generate("hi", sampled())]
                with pytest.raises(asyncio.QueueFull, match="2 requests wait .* max_waiting=2"):
                    llm.generate("hi", sampled())
                with pytest.raises(asyncio.QueueFull, match="raise max_waiting"):
                    await llm.score("hello")
            outputs = await read_all(streams)
            assert [len(o[-1].outputs) for o in outputs] == [5, 1]
            # Those that run do not count.
            running = [llm.generate("hi", ENDLESS), llm.generate("hi", ENDLESS)]
            for stream in running:
                await anext(stream)
            await read_all([llm.generate("hi", sampled()), llm.generate("hi", sampled())])

    run(main())


def test_options_that_make_no_sense_are_refused(make_async_llm):
    with pytest.raises(ValueError, match="max_waiting=0 lets no request in"):
        make_async_llm(max_waiting=0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"step_timeout_s={seconds} must be above 0"):
            make_async_llm(step_timeout_s=seconds)
    with pytest.raises(TypeError, match="nonsense"):
        make_async_llm(nonsense=1)


def test_defaults(async_llm):
    async def main():
        (*_, last) = await read(async_llm.generate("hi"))
        assert len(last.outputs[0].token_ids) <= SamplingParams().max_tokens

    run(main())

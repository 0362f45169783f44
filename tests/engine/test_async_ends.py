"""How streams of `AsyncLLM` end before their time: left, aborted, closed, failed, stuck."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import threading

import pytest

from .serving import CONFIG
from .streaming import (
    ENDLESS,
    JOBS,
    LONG,
    assert_quiet,
    held,
    patient,
    read,
    read_all,
    results,
    run,
    settle,
    wanted,
)
from .texts import assert_idle, sampled


def test_streams_that_end_in_any_way_at_any_step_leave_pages_free(async_llm, monkeypatch):
    """A waiting, a prefilling and a decoding request, cancelled right behind each of its steps."""
    step, seen = async_llm._engine.step, set()

    def cancel_after(num_steps, prompt, num_others):
        streams, num_made, is_done = [], 0, threading.Event()

        def counted():
            nonlocal num_made
            outputs = step()
            num_made += 1
            if num_made == num_steps:
                seen.add(streams[0]._delivery.answer.requests[0].status.value)
                for stream in streams:
                    stream._close()
                is_done.set()
            return outputs

        monkeypatch.setattr(async_llm._engine, "step", counted)
        with held(async_llm):
            others = [async_llm.generate("other", ENDLESS) for _ in range(num_others)]
            streams += [async_llm.generate(prompt, ENDLESS), *others]
            if num_steps == 0:
                for stream in streams:
                    stream._close()
                is_done.set()
        assert is_done.wait(LONG)
        assert_quiet(async_llm)
        assert {s._delivery.answer.requests[0].finish_reason for s in streams} == {"cancelled"}

    for num_steps in range(7):
        cancel_after(num_steps, "x" * 80, 0)
        cancel_after(num_steps, "short", 0)
        cancel_after(num_steps, "last", CONFIG.max_num_seqs)
    assert seen >= {"waiting", "prefill", "decode"}


async def rest(stream):
    """The outputs that are still to come."""
    return [output async for output in stream]


async def leave(llm, how, prompt, params, after, name):
    """Reads `after` outputs of a request, then leaves it in that way."""

    async def look(stream):
        num_seen = 0
        while num_seen < after:
            await anext(stream)
            num_seen += 1

    stream = llm.generate(prompt, params, request_id=name)
    with contextlib.suppress(StopAsyncIteration):
        if how == "drop":
            await look(stream)
            del stream
        elif how == "aclose":
            async with contextlib.aclosing(stream):
                await look(stream)
        elif how == "break":
            num_seen = 0
            async for _ in stream:
                num_seen += 1
                if num_seen > after:
                    break
        elif how == "raise":
            async for _ in stream:
                raise KeyError("mine")
        elif how == "abort":
            await look(stream)
            await llm.abort(name)
        else:
            task = asyncio.create_task(read(stream))
            for _ in range(after):
                await settle(llm)
            task.cancel()
            await task


def test_50_requests_left_at_random_steps(async_llm, make_llm):
    rng = random.Random(0)
    ways = ["drop", "aclose", "break", "raise", "abort", "cancel"]

    async def main():
        left = [
            leave(
                async_llm,
                ways[i % len(ways)],
                "z" * rng.choice([3, 20, 70]),
                sampled(seed=i, max_tokens=rng.randint(5, 40), n=rng.choice([1, 1, 3])),
                rng.randint(0, 5),
                f"request {i}",
            )
            for i in range(50)
        ]
        ends = await asyncio.gather(*left, return_exceptions=True)
        await settle(async_llm)
        return {type(end) for end in ends}

    assert run(main()) <= {type(None), KeyError, asyncio.CancelledError}
    assert_quiet(async_llm)
    streamed = run(read_all([async_llm.generate(*job) for job in JOBS]))
    assert results(outputs[-1] for outputs in streamed) == wanted(make_llm(), JOBS)


def test_a_cancelled_wait_cancels_the_request(async_llm):
    async def main():
        stream = async_llm.generate("hi", ENDLESS)
        with held(async_llm), pytest.raises(TimeoutError):
            while True:
                await asyncio.wait_for(anext(stream), 0.01)
        assert await rest(stream) == []
        await settle(async_llm)
        assert stream._delivery.answer.requests[0].finish_reason == "cancelled"

    run(main())


def test_a_stream_that_nobody_reads_is_cancelled_when_it_is_dropped(async_llm):
    async def main():
        stream = async_llm.generate("hi", ENDLESS)
        request = stream._delivery.answer.requests[0]
        del stream
        gc.collect()
        await settle(async_llm)
        assert request.finish_reason == "cancelled"

    run(main())


def test_abort_ends_a_stream_with_what_there_is(async_llm):
    async def main():
        with held(async_llm):
            stream = async_llm.generate("hi", ENDLESS.replace(n=2), request_id="mine")
            waiting = [async_llm.generate("other", ENDLESS) for _ in range(CONFIG.max_num_seqs)]
        assert stream.request_id == "mine"
        first = await anext(stream)
        reader = asyncio.create_task(read(waiting[-1]))
        await async_llm.abort("mine")
        (last,) = await rest(stream)
        for before, after in zip(first.outputs, last.outputs, strict=True):
            assert after.finish_reason == "cancelled"
            assert before.text + after.text_delta == after.text
            assert before.token_ids == after.token_ids[: len(before.token_ids)]
        for other in waiting:
            await async_llm.abort(other.request_id)
        (*_, cancelled) = await reader
        assert cancelled.outputs[0].finish_reason == "cancelled"
        await async_llm.abort("nobody")
        await async_llm.abort("mine")

    with patient(async_llm):
        run(main())


def test_close_ends_streams_as_cancelled(make_async_llm):
    async def main():
        async with make_async_llm() as llm:
            with patient(llm):
                with held(llm):
                    both = [("hi", ENDLESS), ("ho", ENDLESS.replace(n=2))]
                    streams = [llm.generate(*one) for one in both]
                firsts = [await anext(stream) for stream in streams]
                readers = [asyncio.create_task(rest(stream)) for stream in streams]
                with held(llm):
                    closing = asyncio.create_task(llm.close())
                    await asyncio.sleep(0)
                    with pytest.raises(RuntimeError, match="This AsyncLLM is closed. Make a new"):
                        llm.generate("late")
                await closing
        for first, outputs in zip(firsts, await asyncio.gather(*readers), strict=True):
            text = first.outputs[0].text + "".join(o.outputs[0].text_delta for o in outputs)
            assert text == outputs[-1].outputs[0].text
            assert {one.finish_reason for one in outputs[-1].outputs} == {"cancelled"}
        for late in (llm.score("late"), llm.abort("late")):
            with pytest.raises(RuntimeError, match="AsyncLLM is closed"):
                await late
        await llm.close()
        return llm

    llm = run(main())
    llm._worker._thread.join(LONG)
    assert not llm._worker._thread.is_alive()
    assert_idle(llm)


def test_a_score_that_is_closed_on_is_an_error(make_async_llm):
    async def main():
        llm = make_async_llm()
        with held(llm):
            scoring = asyncio.create_task(llm.score("never scored"))
            await asyncio.sleep(0)
            closing = asyncio.create_task(llm.close())
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="closed before the score was there"):
            await scoring
        await closing

    run(main())


def test_a_failing_step_ends_every_stream_and_later_call_with_its_error(make_async_llm):
    class Lost(Exception):
        pass

    async def main():
        llm = make_async_llm()
        decode, num_calls = llm._engine._executor.decode, itertools.count()

        def fail_at_the_third(*arguments):
            if next(num_calls) == 2:
                raise Lost("device lost")
            return decode(*arguments)

        llm._engine._executor.decode = fail_at_the_third
        with held(llm):
            prompts = "hi", "ho", "x" * 99
            streams = [llm.generate(prompt, ENDLESS.replace(max_tokens=40)) for prompt in prompts]
        await anext(streams[0])
        # A reader that waits, one that looks later, and a call.
        reader = asyncio.create_task(read(streams[1]))
        errors = []
        late = llm.score("late"), llm.abort("late"), rest(streams[0])
        for broken in (reader, rest(streams[0]), rest(streams[2]), *late):
            with pytest.raises(Lost, match="device lost") as caught:
                await broken
            errors.append(caught.value)
        with pytest.raises(Lost) as caught:
            llm.generate("late")
        assert {id(error) for error in errors} == {id(caught.value)}
        await llm.close()
        return llm

    llm = run(main())
    llm._worker._thread.join(LONG)
    assert not llm._worker._thread.is_alive()


def test_a_step_that_does_not_come_back_ends_every_stream(make_async_llm):
    gate = threading.Event()
    llm = make_async_llm(step_timeout_s=0.2)
    llm._engine._executor.prefill = lambda chunks: gate.wait()

    async def main():
        stream = llm.generate("hi", ENDLESS, request_id="mine")
        text = (
            r"A step has taken \d+\.\d s, more than step_timeout_s=0.2, and stands in "
            r"jaxinfer\.[\w.]+ \(running: mine; waiting: 0\). Make a new AsyncLLM; if a step "
            "compiles for so long, use compile_ahead=True or raise step_timeout_s."
        )
        for broken in (read(stream), llm.score("late"), llm.abort("mine")):
            with pytest.raises(RuntimeError, match=text):
                await broken
        with pytest.raises(RuntimeError, match=text):
            llm.generate("late")
        await llm.close()
        assert llm._worker._thread.is_alive()

    try:
        run(main())
    finally:
        gate.set()
    llm._worker._thread.join(LONG)
    assert not llm._worker._thread.is_alive()

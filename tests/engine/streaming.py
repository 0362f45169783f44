"""What the tests of `AsyncLLM` share: requests of many kinds, and what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from .serving import SCRIPT, SCRIPTED
from .texts import BOS, assert_idle, sampled

LONG = 30.0  # seconds that nothing here takes, unless it hangs
ENDLESS = SCRIPTED.replace(max_tokens=100)

JOBS = [
    ("hi", SCRIPTED.replace(max_tokens=14)),
    ("hello", sampled(n=3, max_tokens=9)),
    ([BOS, 20, 30, 40], sampled(seed=5, temperature=0.7, top_k=40)),
    ("x" * 120, sampled(seed=2, max_tokens=20)),
    ("stop", SCRIPTED.replace(max_tokens=14, stop="wör")),
    ("why", sampled(seed=3, logprobs=2, prompt_logprobs=1)),
    ("", sampled(seed=4, repetition_penalty=1.3)),
    ("hi", SCRIPTED.replace(max_tokens=3)),
    ("bad", SCRIPTED.replace(max_tokens=8, bad_words=["w"])),
    ("ends", SCRIPTED.replace(stop_token_ids=[SCRIPT[6]])),
    ([], sampled(n=2, seed=6, max_tokens=5)),
    ("y" * 60, sampled(seed=8, max_tokens=40, ignore_eos=True)),
]


def assert_quiet(llm):
    llm._worker.call(lambda: assert_idle(llm)).result(LONG)
    assert not llm._deliveries


def run(main):
    """What the coroutine returns, in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(main, LONG))


async def read(stream):
    """All outputs of a stream, which grow and whose deltas are the texts."""
    texts, outputs = {}, []
    async for output in stream:
        outputs.append(output)
        for j, completion in enumerate(output.outputs):
            texts[j] = texts.get(j, "") + completion.text_delta
            assert completion.text == texts[j]
    return outputs


async def read_all(streams):
    return await asyncio.gather(*map(read, streams))


def results(outputs):
    """What is the same however requests are put together."""
    return [
        (
            output.prompt,
            output.prompt_token_ids,
            [(one.token_ids, one.text, one.finish_reason) for one in output.outputs],
        )
        for output in outputs
    ]


def wanted(llm, jobs):
    """The results that an `LLM` gives."""
    prompts, params = zip(*jobs)
    return results(llm.generate(prompts, params))


async def settle(llm):
    """Returns None when all that was asked so far is done."""
    await llm._between_steps(lambda: None)


@contextlib.contextmanager
def held(llm):
    """While it lasts, the engine's thread makes no step and no call that comes after it."""
    gate = threading.Event()
    llm._worker.post(gate.wait)
    try:
        yield
    finally:
        gate.set()


@contextlib.contextmanager
def patient(llm):
    """While it lasts, the engine makes no step as long as any output is there to be taken, unless
    somebody calls: however busy the machine, it is not ahead of its readers.
    """
    step = llm._engine.step

    def wait_and_step():
        deadline = time.monotonic() + LONG
        while (
            any(delivery._output is not None for delivery in llm._under_way())
            and llm._worker._inbox.empty()
            and time.monotonic() < deadline
        ):
            time.sleep(0.0005)
        return step()

    llm._engine.step = wait_and_step
    try:
        yield
    finally:
        llm._engine.step = step

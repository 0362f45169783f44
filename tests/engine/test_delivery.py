"""The way of outputs from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest

from jaxinfer.engine.delivery import Delivery, joined, wake
from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput

NO_TIMES = RequestMetrics(None, None, None, None)


def output(text, *deltas, reason=None):
    """A snapshot whose samples have the text and these deltas."""
    outputs = tuple(CompletionOutput((len(text),), text, delta, reason) for delta in deltas)
    return RequestOutput("r", None, (1,), 0, 0, NO_TIMES, outputs)


def test_joined_is_the_later_with_the_deltas_of_both():
    first, then = output("ab", "b", ""), output("abcd", "cd", "x", reason="stop")
    assert joined(first, then) == output("abcd", "bcd", "x", reason="stop")


def test_what_nobody_took_is_one_output():
    delivery = Delivery(SimpleNamespace())
    for n in range(1, 6):
        assert delivery.put(output("x" * n, "x"), is_last=n == 5) is None
    assert asyncio.run(delivery.take()) == output("xxxxx", "xxxxx")
    assert asyncio.run(delivery.take()) is None


def test_after_the_end_nothing_comes():
    delivery = Delivery(SimpleNamespace())
    delivery.put(output("a", "a"), is_last=False)
    delivery.fail()
    delivery.put(output("ab", "b"), is_last=False)
    assert delivery.is_over and delivery.has_failed
    assert asyncio.run(delivery.take()) == output("a", "a")
    assert asyncio.run(delivery.take()) is None


def test_one_task_waits_at_a_time():
    async def main():
        delivery = Delivery(SimpleNamespace())
        first = asyncio.create_task(delivery.take())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Two tasks wait for the next output of one request"):
            await delivery.take()
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.create_task(delivery.take())
        await asyncio.sleep(0)
        wake([delivery.put(output("a", "a"), is_last=True)])
        assert await again == output("a", "a")

    asyncio.run(main())


def test_a_loop_is_called_once_for_all_who_wait_in_it(monkeypatch):
    async def main():
        loop, calls = asyncio.get_running_loop(), []
        deliveries = [Delivery(SimpleNamespace()) for _ in range(10)]
        tasks = [asyncio.create_task(delivery.take()) for delivery in deliveries]
        await asyncio.sleep(0)
        real = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (calls.append(a), real(*a)))
        wake([d.put(output("a", "a"), is_last=True) for d in deliveries] + [None])
        assert len(calls) == 1
        assert await asyncio.gather(*tasks) == [output("a", "a")] * 10
        wake([d.put(output("ab", "b"), is_last=True) for d in deliveries])
        assert len(calls) == 1, "nobody waits"

    asyncio.run(main())


def test_a_closed_loop_and_one_who_no_longer_waits_are_no_error():
    async def main():
        waiter = asyncio.get_running_loop().create_future()
        waiter.cancel()
        wake([waiter])
        await asyncio.sleep(0)
        return asyncio.get_running_loop().create_future()

    wake([asyncio.run(main())])


def test_nothing_is_lost_between_two_threads():
    """Bursts of puts against a reader that now waits and now looks away."""
    rng, text = random.Random(0), "".join(map(chr, range(200, 2200)))
    delivery, has_begun = Delivery(SimpleNamespace()), threading.Event()
    pauses = [rng.random() < 0.1 for _ in text]

    def put_all():
        for n, pause in enumerate(pauses, 1):
            is_last = n == len(text)
            wake([delivery.put(output(text[:n], text[n - 1]), is_last=is_last)])
            if pause:
                has_begun.wait(10)
                threading.Event().wait(0.0002)

    async def read():
        found, num_taken = "", 0
        while (one := await delivery.take()) is not None:
            has_begun.set()
            found += one.outputs[0].text_delta
            num_taken += 1
            assert found == one.outputs[0].text
            if rng.random() < 0.3:
                await asyncio.sleep(0.001)
        return found, num_taken

    putter = threading.Thread(target=put_all)
    putter.start()
    found, num_taken = asyncio.run(read())
    putter.join()
    assert found == text
    assert num_taken > 1

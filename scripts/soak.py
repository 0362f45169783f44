"""Serves mixed traffic for minutes on end; exits with 1 if anything leaks, grows or slows down.

    python scripts/soak.py --model smollm2-135m --minutes 20

Clients ask an `AsyncLLM` for texts and scores of all lengths and parameters. Some leave in the
middle, some abort, some ask for what cannot be and must be refused. Now and then all hold still,
and then

- every page and row is accounted for, and none is held;
- resident memory is what it was after the first two minutes;
- a request alone costs what it did: processor time, over that of the pure `generate` for the same
  tokens. Both are taken in turns, so that what else the machine does slows down both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

import jaxinfer
from jaxinfer.compute import generate, make_sampling_state

SETTLE_S = 120.0  # what is allocated once is by then
MAX_GROWTH = 0.01  # of resident memory
MAX_DRIFT = 0.10  # of the cost of a request
PROBE = (64, 32)  # tokens of the prompt and of the output
PROBES = 5  # of each kind at a time; the cheapest counts

GREEDY = jaxinfer.SamplingParams(temperature=0.0, max_tokens=PROBE[1], ignore_eos=True)
# Fewer pages than the rows can fill, so that requests are preempted.
ENGINE = dict(
    max_model_len=512,
    max_num_seqs=8,
    page_size=16,
    num_pages=40,
    policy="priority",
    max_overtakes=8,
)
REFUSED = (
    dict(prompt=[5] * ENGINE["max_model_len"]),  # no room for one token more
    dict(prompt=[-1]),
    dict(prompt=[3, 1 << 30]),
    dict(params=dict(logprobs=100)),
    dict(params=dict(stop_token_ids=[1 << 30])),
    dict(params=dict(top_p=2.0)),
    dict(params=dict(max_tokens=0)),
)


@dataclass(frozen=True)
class Check:
    """What was found while all held still, `time_s` after the start."""

    time_s: float
    resident: int  # bytes
    engine_s: float  # processor time of a request alone
    pure_s: float  # that of `generate` for the same tokens


class Traffic:
    """Clients of one `AsyncLLM`; `done` counts what came of their requests, by kind."""

    def __init__(self, llm: jaxinfer.AsyncLLM, vocab_size: int, seed: int):
        self.done: Counter[str] = Counter()
        self._llm, self._rng, self._vocab_size = llm, random.Random(seed), vocab_size
        self._beginnings = [self._ids(96) for _ in range(4)]
        self._open = asyncio.Event()
        self._open.set()
        self._num_asking = 0

    async def client(self) -> None:
        """Asks for one thing after another, until it is cancelled."""
        kinds = (self._whole, self._leave, self._abort, self._time_out, self._score, self._bad)
        while True:
            await self._open.wait()
            (ask,) = self._rng.choices(kinds, weights=(6, 2, 1, 1, 1, 1))
            self._num_asking += 1
            try:
                await ask()
            finally:
                self._num_asking -= 1
            self.done[ask.__name__.strip("_")] += 1

    @contextlib.asynccontextmanager
    async def held(self):
        """Within it no request is under way."""
        self._open.clear()
        while self._num_asking:
            await asyncio.sleep(0.01)
        yield
        self._open.set()

    async def _whole(self) -> None:
        params = self._params()
        stream = self._llm.generate(self._prompt(), params, priority=self._rng.randrange(3))
        outputs = [output async for output in stream]
        assert len(outputs[-1].outputs) == params.n
        for one in outputs[-1].outputs:
            assert one.finish_reason in ("stop", "length"), one
            assert 1 <= len(one.token_ids) <= params.max_tokens, one

    async def _leave(self) -> None:
        num_seen = self._rng.randrange(4)
        async with contextlib.aclosing(
            self._llm.generate(self._prompt(), self._params())
        ) as stream:
            for _ in range(num_seen):
                await anext(stream, None)

    async def _abort(self) -> None:
        stream = self._llm.generate(self._prompt(), self._params())
        await asyncio.sleep(self._rng.random())
        await self._llm.abort(stream.request_id)
        outputs = [output async for output in stream]
        assert all(one.finish_reason for one in outputs[-1].outputs)

    async def _time_out(self) -> None:
        stream = self._llm.generate(self._prompt(), self._params())
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 0.5 * self._rng.random())
        await stream.aclose()

    async def _score(self) -> None:
        ids = self._prompt()
        assert len(await self._llm.score(ids)) == len(ids) - 1

    async def _bad(self) -> None:
        wrong = self._rng.choice(REFUSED)
        try:
            params = jaxinfer.SamplingParams(**wrong.get("params", {}))
            self._llm.generate(wrong.get("prompt", [5, 6]), params)
        except ValueError:
            return
        raise AssertionError(f"{wrong} was not refused")

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab_size) for _ in range(count)]

    def _prompt(self) -> list[int]:
        beginning = self._rng.choice([[], self._rng.choice(self._beginnings)])
        return beginning + self._ids(self._rng.choice((2, 8, 30, 100, 300)))

    def _params(self) -> jaxinfer.SamplingParams:
        choose = self._rng.choice
        return jaxinfer.SamplingParams(
            temperature=choose((0.0, 0.7, 1.0)),
            top_k=choose((0, 0, 40)),
            top_p=choose((1.0, 0.9)),
            repetition_penalty=choose((1.0, 1.2)),
            max_tokens=choose((1, 4, 16, 48)),
            logprobs=choose((None, None, 3)),
            stop=choose((None, [" the"])),
            ignore_eos=choose((False, True)),
            n=choose((1, 1, 1, 3)),
        )


def resident() -> int:
    """Bytes of this process in memory now; where that is not known, the most there ever were."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_pure(model, params) -> Callable[[Sequence[int]], object]:
    """A function that generates what a probe does, without an engine."""
    run = jax.jit(functools.partial(generate, model, max_tokens=PROBE[1], page_size=32))

    def pure(ids: Sequence[int]) -> object:
        state = make_sampling_state([GREEDY], [ids], vocab_size=model.config.vocab_size)
        tokens_1T, lens_1 = np.array([ids], np.int32), np.array([len(ids)], np.int32)
        return jax.block_until_ready(run(params, tokens_1T, lens_1, state))

    return pure


async def cost_s(ask: Callable[[], object]) -> float:
    """Seconds of processor time, of all threads, that `ask` takes."""
    start = time.process_time()
    result = ask()
    if asyncio.iscoroutine(result):
        await result
    return time.process_time() - start


async def check(llm, pure, rng: np.random.Generator, vocab_size: int, start_s: float) -> Check:
    """What is found while no request is under way; AssertionError if the accounts are wrong."""
    await llm.check_integrity()
    found = await llm.metrics()
    assert (found["pages_held"], found["num_running"], found["num_waiting"]) == (0, 0, 0), found
    assert found["pages_cached"] + found["pages_free"] == found["pages_total"], found
    assert found["compiles_after_warmup"] == 0, found
    memory = resident()

    async def probe(ids: list[int]) -> None:
        async for output in llm.generate(ids, GREEDY):
            assert output.cached_tokens == 0

    costs = []
    for _ in range(PROBES):
        ids = rng.integers(3, vocab_size, PROBE[0]).tolist()
        engine_s = await cost_s(lambda ids=ids: probe(ids))
        costs.append((engine_s, await cost_s(lambda ids=ids: pure(ids))))
    engine_s, pure_s = map(min, zip(*costs))
    return Check(time.perf_counter() - start_s, memory, engine_s, pure_s)


def verdict(checks: Sequence[Check], settle_s: float = SETTLE_S) -> tuple[float, float]:
    """`(growth, drift)` of memory and of the cost of a request: the last third of the checks after
    `settle_s` over the first, minus 1; of each the median.

    Raises ValueError if there are fewer than three.
    """
    settled = [one for one in checks if one.time_s >= settle_s]
    third = len(settled) // 3
    if not third:
        raise ValueError(f"{len(settled)} checks after {settle_s} s tell nothing. Run for longer.")
    memory = [one.resident for one in settled]
    costs = [one.engine_s / one.pure_s for one in settled]
    return tuple(
        statistics.median(values[-third:]) / statistics.median(values[:third]) - 1
        for values in (memory, costs)
    )


async def soak(args: argparse.Namespace) -> list[Check]:
    """The checks of the whole run, each printed."""
    model, params = jaxinfer.load(args.model, dtype=args.dtype)
    vocab_size = model.config.vocab_size
    opened = await asyncio.to_thread(
        jaxinfer.AsyncLLM, args.model, dtype=args.dtype, compile_ahead=True, **ENGINE
    )
    checks, rng = [], np.random.default_rng(args.seed)
    async with opened as llm, asyncio.TaskGroup() as group:
        await llm.update_params(params)  # one copy of the weights for both
        vocab_size = min(vocab_size, llm.tokenizer.vocab_size)  # a head may have more rows
        pure = make_pure(model, params)
        pure([3] * PROBE[0])  # compiles
        traffic, start_s = Traffic(llm, vocab_size, args.seed), time.perf_counter()
        clients = [group.create_task(traffic.client()) for _ in range(args.clients)]
        print(
            "minute  requests  cancelled  refused  preempted  resident MiB  "
            "engine CPU s  pure CPU s  ratio"
        )
        while time.perf_counter() - start_s < 60 * args.minutes:
            await asyncio.sleep(args.period)
            async with traffic.held():
                one = await check(llm, pure, rng, vocab_size, start_s)
            checks.append(one)
            found = await llm.metrics()
            print(
                f"{one.time_s / 60:6.1f} {sum(traffic.done.values()):9,} "
                f"{found['finished'].get('cancelled', 0):10,} {traffic.done['bad']:8,} "
                f"{found['preempted']:10,} {one.resident / 2**20:13,.1f} {one.engine_s:13.3f} "
                f"{one.pure_s:11.3f} {one.engine_s / one.pure_s:6.2f}",
                flush=True,
            )
        for client in clients:
            client.cancel()
    print(", ".join(f"{count:,} {kind}" for kind, count in sorted(traffic.done.items())))
    print(", ".join(f"{name} {found[name]:,}" for name in SHOWN))
    return checks


SHOWN = (
    *("prompt_tokens", "cached_tokens", "prefill_tokens", "recomputed_tokens", "output_tokens"),
    *("preempted", "evicted_pages"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if memory and cost are flat and all accounts were right, else 1 or an error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, path or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16, help="that ask at the same time")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between two checks")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds that do not count")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    args = parser.parse_args(argv)
    growth, drift = verdict(asyncio.run(soak(args)), args.settle)
    print(f"resident memory {growth:+.2%} (at most {MAX_GROWTH:+.0%})")
    print(f"processor time of a request {drift:+.1%} (at most {MAX_DRIFT:+.0%})")
    return int(growth > MAX_GROWTH or drift > MAX_DRIFT)


if __name__ == "__main__":
    sys.exit(main())

"""Batch-invariant mode: the same bits alone and among others, for any chunks, after a prefix hit,
preempted at any step, and in a new engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import pytest

from jaxinfer import Engine, EngineConfig, SamplingParams
from jaxinfer.sched import Scheduler

from .serving import drain, prompt_of, run

CONFIG = EngineConfig(
    max_model_len=128,
    max_num_seqs=32,
    page_size=16,
    num_pages=256,
    prefill_chunk=32,  # few shapes of calls to compile
    max_window=4,
    max_logprobs=5,
    batch_invariant=True,
)
NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
DRAWN = GREEDY.replace(temperature=0.9, top_p=0.9, seed=7)
KINDS = (
    GREEDY.replace(prompt_logprobs=5),
    DRAWN,
    DRAWN.replace(top_k=300, logprobs_mode="processed", prompt_logprobs=2),
    DRAWN.replace(top_p=1.0, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.5),
    GREEDY.replace(logprobs=None),
)
PROMPT = prompt_of(61)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def world(request, wide):
    """One dtype: `.make`, a function that makes an engine of `CONFIG` with changes; `.alone`, one
    from (prompt, params) to what the request gives with no other in the engine.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(request.param), wide.params)
    programs = {}

    def make(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        is_new = config.prefill_chunk not in programs
        engine = Engine(wide.model, params, config, compile_ahead=is_new)
        assert engine.config.kv_dtype == request.param
        # Whatever else changes is of the host alone.
        engine._executor._programs = programs.setdefault(
            config.prefill_chunk, engine._executor._programs
        )
        return engine

    quiet, known = make(prefix_cache=False), {}

    def alone(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            known[key] = bits(*run(quiet, [(prompt, params)]))
        return known[key]

    return SimpleNamespace(make=make, alone=alone)


def bits(request):
    """All that a request gave, in a form that differs where a bit does."""
    gave = request.output_ids, request.finish_reason, request.logprobs, request.prompt_logprobs
    assert len(request.logprobs) in (0, len(request.output_ids))
    return repr(gave)


def jobs_of(number):
    """As many requests, of every kind and of lengths up to 90."""
    return [
        (prompt_of(2 + 37 * i % 89, seed=i), KINDS[i % len(KINDS)].replace(max_tokens=4 + i % 11))
        for i in range(number)
    ]


def test_what_is_compared_shows_the_last_bit(world):
    (request,) = run(world.make(), [(PROMPT, KINDS[0])])
    before = bits(request)
    assert before == world.alone(PROMPT, KINDS[0])
    first = request.logprobs[0]
    lower = dataclasses.replace(first, logprob=first.logprob * (1 + 2**-24))
    assert lower.logprob != first.logprob
    request.logprobs[0] = lower
    assert bits(request) != before


def test_each_of_32_gives_what_it_gives_alone(world):
    jobs = [*jobs_of(31), (PROMPT, DRAWN)]
    requests = run(world.make(), jobs)
    assert [bits(request) for request in requests] == [world.alone(*job) for job in jobs]


@pytest.mark.parametrize("tokens", [5, 16, 31])
def test_any_chunks(world, tokens):
    """Of so many tokens, or fewer beside rows that decode."""
    engine = world.make()
    few = dataclasses.replace(CONFIG, max_num_seqs=4, token_budget=tokens, prefix_cache=False)
    engine.scheduler = Scheduler(few)
    jobs = [(PROMPT, params) for params in KINDS]
    requests = run(engine, jobs)
    assert [bits(request) for request in requests] == [world.alone(*job) for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("prefill_chunk", [16, 64, 127])
def test_any_shapes_of_chunks(world, prefill_chunk):
    jobs = [(PROMPT, params) for params in KINDS]
    requests = run(world.make(prefill_chunk=prefill_chunk), jobs)
    assert [bits(request) for request in requests] == [world.alone(*job) for job in jobs]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_after_a_prefix_hit(world, params):
    engine = world.make()
    (first,) = run(engine, [(PROMPT, params)])
    # The same again; one that goes on elsewhere behind 40 tokens; one that goes on from the answer,
    # whose keys and values were decoded.
    prompts = PROMPT, PROMPT[:40] + prompt_of(23), [*PROMPT, *first.output_ids, *prompt_of(9)]
    requests = [run(engine, [(prompt, params)])[0] for prompt in prompts]
    assert [request.num_cached for request in requests] == [48, 32, 64]
    for prompt, request in zip(prompts, requests):
        assert bits(request) == world.alone(prompt, params)


@pytest.mark.parametrize(
    "params",
    [pytest.param(GREEDY, marks=pytest.mark.slow, id="greedy"), pytest.param(DRAWN, id="drawn")],
)
def test_preempted_at_each_step(world, params):
    engine = world.make(prefix_cache=False, max_window=1)
    num_pages, lost = CONFIG.cache.num_pages, set()
    # Where one prompt misses a step, as the first changes the shape of its call, another does not.
    for length, room in itertools.product((33, 32), range(NUM_TOKENS + 1)):
        prompt = PROMPT[:length]
        # The first needs its third page after `room` tokens, and there is none left: the second,
        # whose own three hold all that it gives, loses them and computes all of it again.
        first_prompt = prompt_of(32 - room, seed=room)
        taken = engine.scheduler.shards[0].pool.allocate(num_pages - (-(-(33 - room) // 16) + 3))
        jobs = [(first_prompt, GREEDY.replace(max_tokens=NUM_TOKENS + 10)), (prompt, params)]
        requests = [engine.add_request(*job) for job in jobs]
        while engine.has_work:
            engine.step()
        engine.scheduler.shards[0].pool.free(taken)
        assert bits(requests[1]) == world.alone(prompt, params)
        if requests[1].num_preemptions:
            lost.add(requests[1].num_lost - len(prompt))
    # Its first token and the next step are of one plan, and of the last token nothing is computed.
    assert lost >= set(range(1, NUM_TOKENS))


def test_a_new_engine(world, wide):
    engine = world.make()
    programs = engine._executor._programs
    again = Engine(wide.model, engine._executor._params, CONFIG)
    assert again._executor._programs is not programs
    jobs = [(PROMPT, params) for params in KINDS]
    requests = [again.add_request(*job) for job in jobs]
    drain(again)
    assert [bits(request) for request in requests] == [world.alone(*job) for job in jobs]

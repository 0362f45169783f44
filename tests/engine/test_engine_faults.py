"""What must not hurt the engine: bad requests, cancelled ones, garbage in unused pages."""

from __future__ import annotations

import math
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.compute import KVCache

from .serving import CONFIG, EOS, GREEDY, SCRIPTED, V, drain, prompt_of, result, results, run

JOBS = [(prompt_of(n), SamplingParams(seed=n, max_tokens=9)) for n in (1, 33, 16, 70, 8, 5)]


def poison(engine):
    """Fills every slot of the cache that holds no token, of a request or to share, with NaN."""
    used = np.zeros((CONFIG.num_pages, CONFIG.page_size), bool)
    used[list(engine.scheduler.shards[0].pool._cached)] = True
    for request in engine.scheduler.shards[0].running:
        for position in range(request.num_computed):
            page, slot = divmod(position, CONFIG.page_size)
            used[request.pages[page], slot] = True
    unused = jnp.asarray(~used)[:, None, :, None]
    executor = engine._executor
    pages = tuple(jnp.where(unused, jnp.nan, layer) for layer in executor._cache.pages)
    executor._cache = KVCache(pages)
    return int(unused.sum())


def test_nan_in_every_unused_slot_changes_nothing(make_engine, alone):
    engine = make_engine()
    requests = [engine.add_request(*job) for job in JOBS]
    poisoned = []
    while engine.has_work:
        poisoned.append(poison(engine))
        engine.step()
    assert results(requests) == [alone(*job) for job in JOBS]
    assert all(0 < count <= CONFIG.num_pages * CONFIG.page_size for count in poisoned)


def test_50_requests_cancelled_at_random_steps(make_engine, alone):
    engine = make_engine()
    rng = random.Random(0)
    underway, seen = [], set()
    for i in range(50):
        params = SamplingParams(seed=i, max_tokens=rng.randint(5, 40))
        underway.append(engine.add_request(prompt_of(rng.choice([3, 20, 70]), i), params))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if len(underway) > 4:
            request = underway.pop(rng.randrange(len(underway)))
            seen.add(request.status)
            engine.cancel(request.id)
            engine.check_integrity()
    for request in underway:
        engine.cancel(request.id)
    assert not engine.has_work
    assert {status.value for status in seen} >= {"waiting", "decode"}
    assert engine.scheduler.shards[0].pool.num_available == CONFIG.num_pages
    assert results(run(engine, JOBS)) == [alone(*job) for job in JOBS]


def test_a_cancelled_request_brings_nothing_more(engine):
    cancelled = engine.add_request(prompt_of(5), SCRIPTED.replace(max_tokens=40))
    other = engine.add_request(prompt_of(6), SCRIPTED.replace(max_tokens=20))
    while len(cancelled.output_ids) < 5:
        engine.step()
    kept = list(cancelled.output_ids)
    engine.cancel(cancelled.id)
    assert (cancelled.finish_reason, cancelled.pages) == ("cancelled", [])
    brought = drain(engine)
    assert list(brought) == [other.id]
    assert cancelled.output_ids == kept
    assert len(other.output_ids) == 20
    engine.cancel(cancelled.id)
    engine.cancel("nobody")


def test_a_row_taken_from_a_cancelled_request_starts_clean(make_engine, alone):
    """All eight rows are cancelled with windows under way, then used again at once."""
    engine = make_engine()
    first = [engine.add_request(prompt_of(4, i), GREEDY) for i in range(8)]
    while not first[0].output_ids:
        engine.step()
    for request in first:
        engine.cancel(request.id)
    jobs = [(prompt_of(9, i), SamplingParams(seed=i, max_tokens=6)) for i in range(8)]
    assert results(run(engine, jobs)) == [alone(*job) for job in jobs]


@pytest.mark.parametrize(
    "prompt, match",
    [
        ([], "empty prompt"),
        ((), "empty prompt"),
        (np.zeros(0, np.int64), "empty prompt"),
        ([[]], "not a list of integer token ids"),
        (np.zeros((1, 0), np.int32), "not a list of integer token ids"),
        ([[5, 6]], "not a list of integer token ids"),
        ("", "not a list of integer token ids"),
        ("text", "not a list of integer token ids"),
        ([""], "not a list of integer token ids"),
        ([5.0], "not a list of integer token ids"),
        ([True], "not a list of integer token ids"),
        ([None], "not a list of integer token ids"),
        (5, "not a list of integer token ids"),
        ([5, V], r"token id 1000; the model has ids 0\.\.999"),
        ([5, -1], r"token id -1; the model has ids 0\.\.999"),
        ([2**31 + 5], "token id 2147483653"),
        ([2**70], "not a list of integer token ids"),
        ([3] * 255 + [4], "max_model_len=256"),
        ([3] * 200, "needs 27 pages"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_at_once(engine, alone, prompt, match):
    with pytest.raises(ValueError, match=match):
        engine.add_request(prompt, GREEDY)
    assert not engine.has_work
    job = (prompt_of(6), GREEDY)
    assert result(run(engine, [job])[0]) == alone(*job)


FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.5])
def test_floats_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {V: 1.0}},
        {"stop_token_ids": [V]},
        {"allowed_token_ids": [V]},
        {"bad_words": [[V]]},
        {"bad_words": ["text"]},
        {"min_tokens": 1, "allowed_token_ids": [EOS]},
    ],
)
def test_parameters_that_this_model_cannot_apply_are_refused(engine, alone, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        engine.add_request(prompt_of(4), GREEDY.replace(**fields))
    assert not engine.has_work
    job = (prompt_of(4), GREEDY)
    assert result(run(engine, [job])[0]) == alone(*job)


def test_a_top_k_of_any_size_is_applied(engine, alone):
    prompt, params = prompt_of(4), SamplingParams(seed=1)
    jobs = [(prompt, params.replace(top_k=k)) for k in (-1, 0, V, V + 5, 10**9)]
    assert results(run(engine, jobs)) == [alone(prompt, params)] * 5
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=-2)


def test_names_of_requests_under_way_are_their_own(engine):
    first = engine.add_request(prompt_of(3), GREEDY, request_id="mine")
    with pytest.raises(ValueError, match="'mine' was added before"):
        engine.add_request(prompt_of(4), GREEDY, request_id="mine")
    drain(engine)
    again = engine.add_request(prompt_of(3), GREEDY, request_id="mine")
    drain(engine)
    assert result(first) == result(again)


def test_a_name_that_looks_like_one_of_the_engines_own_is_no_trap(make_engine):
    engine = make_engine()
    named = [engine.add_request(prompt_of(3), GREEDY, request_id=str(n)) for n in range(3)]
    unnamed = [engine.add_request(prompt_of(3), GREEDY) for _ in range(3)]
    drain(engine)
    assert len({r.id for r in named + unnamed}) == 6


def test_300_short_requests_leak_no_page(engine):
    rng = random.Random(1)
    jobs = [
        (prompt_of(rng.randint(1, 30), i), SCRIPTED.replace(max_tokens=rng.randint(1, 4)))
        for i in range(300)
    ]
    assert [len(r.output_ids) for r in run(engine, jobs)] == [p.max_tokens for _, p in jobs]

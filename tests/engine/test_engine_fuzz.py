"""Requests of every kind on a cache too small for them, some cancelled: each as if alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxinfer import SamplingParams
from jaxinfer.sched import Status

from .serving import EOS, SCRIPT, SCRIPTED, V, assert_same_logprobs, drain, prompt_of, result

# 14 pages for 8 rows, and one request may need them all; chunks of 12 to 20 tokens.
CROWDED = {"num_pages": 14, "token_budget": 20, "policy": "priority", "max_overtakes": 20}


def random_params(rng):
    """Parameters of which each is off more often than not."""

    def maybe(*values, chance=0.3, default):
        return rng.choice(values) if rng.random() < chance else default

    max_tokens = rng.choice((1, 2, 3, 8, 12, 40, 60))
    if rng.random() < 0.1:
        stop = rng.choice(SCRIPT[:14])
        return SCRIPTED.replace(max_tokens=max_tokens, stop_token_ids=[stop], logprobs=1)
    return SamplingParams(
        temperature=maybe(0.0, 0.3, 2.0, 1e6, chance=0.6, default=1.0),
        top_k=maybe(1, 5, 100, default=0),
        top_p=maybe(0.3, 0.9, default=1.0),
        min_p=maybe(0.01, 0.2, default=0.0),
        repetition_penalty=maybe(0.8, 1.3, default=1.0),
        presence_penalty=maybe(-1.0, 2.0, default=0.0),
        frequency_penalty=maybe(-0.5, 1.0, default=0.0),
        logit_bias=maybe({EOS: 7.0}, {EOS: 6.0, 8: -5.0}, chance=0.5, default=None),
        allowed_token_ids=maybe(range(0, V, 3), chance=0.1, default=None),
        bad_words=maybe([[7]], [[7, 8], [9]], chance=0.2, default=None),
        stop_token_ids=maybe(range(0, V, 40), chance=0.3, default=None),
        ignore_eos=rng.random() < 0.2,
        min_tokens=maybe(1, max_tokens, default=0),
        max_tokens=max_tokens,
        seed=rng.randrange(-(2**63), 2**63),
        n=maybe(2, 3, chance=0.15, default=1),
        logprobs=maybe(0, 1, 20, chance=0.4, default=None),
        prompt_logprobs=maybe(0, 3, chance=0.2, default=None),
        logprobs_mode=maybe("processed", default="raw"),
    )


def random_jobs(rng, count):
    """(prompt, params), prompts in part alike, so that they share pages."""
    stems = [prompt_of(40, seed) for seed in (1, 2, 3)]
    for i in range(count):
        length = rng.randint(1, 50) if rng.random() < 0.2 else rng.randint(1, 20)
        stem = rng.choice(stems)[: rng.randint(1, 40)] if rng.random() < 0.3 else []
        yield (*stem, *prompt_of(length, i))[:50], random_params(rng)


def serve(engine, rng, jobs):
    """`(groups, cancelled as)`: the samples of each job, served together, some cancelled."""
    groups, requests, cancelled_as = [], [], Counter()
    for prompt, params in jobs:
        groups.append(engine.add_samples(prompt, params, priority=rng.randint(-1, 1)))
        requests += groups[-1]
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            engine.step()
            engine.check_integrity()
        under_way = [request for request in requests if request.finish_reason is None]
        if under_way and rng.random() < 0.2:
            status = rng.choice([s for s in Status if any(r.status is s for r in under_way)])
            victim = rng.choice([r for r in under_way if r.status is status])
            cancelled_as[status] += 1
            engine.cancel(victim.id)
            engine.check_integrity()
    drain(engine)
    return groups, cancelled_as


def assert_as_alone(engine, job, samples):
    """Asserts that each of `samples` is what it is with nothing else in the idle `engine`."""
    for request, solo in zip(samples, engine.make_samples(*job), strict=True):
        engine.add([solo])
        drain(engine)
        if request.finish_reason == "cancelled":
            assert request.output_ids == solo.output_ids[: len(request.output_ids)], job
        else:
            assert result(request) == result(solo), job
        assert_same_logprobs(request, solo)


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_mixed_requests_equal_their_solo_runs(make_engine, count):
    rng = random.Random(3)
    jobs = list(random_jobs(rng, count))
    engine, quiet = make_engine(host=CROWDED), make_engine(host={"prefix_cache": False})
    groups, cancelled_as = serve(engine, rng, jobs)
    for job, samples in zip(jobs, groups, strict=True):
        assert_as_alone(quiet, job, samples)

    found, requests = engine.metrics(), [request for group in groups for request in group]
    assert found["finished"] == Counter(request.finish_reason for request in requests)
    assert found["finished"]["cancelled"] == cancelled_as.total()
    assert found["compiles_after_warmup"] == quiet.metrics()["compiles_after_warmup"] == 0
    assert found["preempted"] == sum(request.num_preemptions for request in requests)
    assert (found["pages_held"], engine.scheduler.shards[0].pool.num_available) == (
        0,
        CROWDED["num_pages"],
    )
    # What these lives met.
    assert min(cancelled_as[s] for s in (Status.WAITING, Status.PREFILL, Status.DECODE)) > 2
    assert min(found["finished"][reason] for reason in ("stop", "length")) > 40
    assert found["preempted"] > count / 20 and found["recomputed_tokens"] > count
    assert found["cached_tokens"] > count and found["evicted_pages"] > count
    lost = [request for request in requests if request.num_preemptions]
    assert any(request.logprobs for request in lost)
    assert any(request.prompt_logprobs for request in lost)

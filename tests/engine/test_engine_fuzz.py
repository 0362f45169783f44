"""300 requests of every kind on a cache too small for them, some cancelled: each as if alone."""

from __future__ import annotations

import random

from jaxinfer import SamplingParams
from jaxinfer.sched import Status

from .serving import CONFIG, EOS, SCRIPT, SCRIPTED, V, drain, prompt_of, result, run


def random_params(rng):
    """Parameters of which each is off more often than not."""

    def maybe(*values, chance=0.3, default):
        return rng.choice(values) if rng.random() < chance else default

    max_tokens = rng.choice((1, 2, 3, 5, 8, 12))
    if rng.random() < 0.1:
        stop = rng.choice(SCRIPT[:14])
        return SCRIPTED.replace(max_tokens=max_tokens, stop_token_ids=[stop])
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
    )


def random_jobs(rng, count):
    for i in range(count):
        length = rng.randint(1, 100) if rng.random() < 0.2 else rng.randint(1, 20)
        yield prompt_of(length, i), random_params(rng)


def test_300_mixed_requests_equal_their_solo_runs(make_engine):
    rng = random.Random(3)
    jobs = list(random_jobs(rng, 300))
    engine, requests, cancelled_as, most_waiting = make_engine(), [], [], 0
    for job in jobs:
        requests.append(engine.add_request(*job))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            engine.step()
            engine.check_integrity()
        most_waiting = max(most_waiting, engine.scheduler.num_waiting)
        prefilling = [r for r in requests if r.status is Status.PREFILL]
        victim = rng.choice(prefilling or requests[-30:])
        if rng.random() < 0.3 and victim.finish_reason is None:
            cancelled_as.append(victim.status)
            engine.cancel(victim.id)
            engine.check_integrity()
    drain(engine)

    assert most_waiting > 10
    assert {Status.WAITING, Status.PREFILL, Status.DECODE} == set(cancelled_as)
    assert engine.scheduler.pool.num_available == CONFIG.num_pages
    quiet, reasons = make_engine(), []
    for request, job in zip(requests, jobs):
        (solo,) = run(quiet, [job])
        reasons.append(request.finish_reason)
        if request.finish_reason == "cancelled":
            assert request.output_ids == solo.output_ids[: len(request.output_ids)]
        else:
            assert result(request) == result(solo), job
    assert len(cancelled_as) == reasons.count("cancelled") > 20
    assert min(reasons.count("stop"), reasons.count("length")) > 40

"""Log-probabilities through the engine: what a recomputation of every token gives, whoever else is
served.
"""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from jaxinfer import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.compute import init_cache, make_prefill_batch
from jaxinfer.compute.cutoff import TOP_P_SLACK
from jaxinfer.compute.steps import prefill_hidden

from ..compute import sampling_oracle
from .serving import (
    CONFIG,
    EOS,
    GREEDY,
    SCRIPTED,
    V,
    drain,
    note_chunks,
    prompt_of,
    result,
    run,
)

WIDTH = 192


def asking(logprobs=None, **fields):
    return SamplingParams(**{"logprobs": logprobs, "max_tokens": 6, "seed": 1, **fields})


@pytest.fixture(scope="module")
def logits_of(wide):
    """A function from up to 192 ids to the logits [T, V] after each, all computed at once."""
    config = wide.model.config

    @jax.jit
    def whole(params, batch):
        cache = CacheConfig(num_pages=batch.page_table_BM.size, dtype="float32")
        _, x_BTD = prefill_hidden(wide.model, params, init_cache(config, cache), batch)
        return wide.model.unembed(params, x_BTD[0])

    def ask(ids):
        batch = make_prefill_batch([[*ids, *[0] * (WIDTH - len(ids))]], max_tokens=1)
        return np.asarray(whole(wide.params, batch))[: len(ids)]

    return ask


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def drawn_from(logits, params, prompt, output):
    """Log-probabilities of the distribution that is sampled from, float64; -inf where 0."""
    processed = sampling_oracle.process(logits, params, prompt, output, eos_ids=[EOS])
    with np.errstate(divide="ignore"):
        return np.log(sampling_oracle.distribution(processed, params, slack=float(TOP_P_SLACK)))


def check(entry, token, want, num_top):
    """Asserts that `entry` says of `token` what the log-probabilities `want` [V] do."""
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(want[token], abs=1e-4)
    assert len(entry.top) == num_top
    values = list(entry.top.values())
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(sorted(want, reverse=True)[:num_top], abs=1e-4)
    assert values == pytest.approx([want[v] for v in entry.top], abs=1e-4)
    assert all(type(value) is float for value in (entry.logprob, *values))


def check_request(request, logits_of):
    """Asserts that a finished request has the log-probabilities that it asks for, and no others."""
    params, prompt, output = request.params, list(request.prompt_ids), request.output_ids
    logits = logits_of([*prompt, *output])
    is_raw = params.logprobs_mode == "raw"
    count = 0
    if params.logprobs is not None:
        assert len(request.logprobs) == len(output)
        for i, (entry, token) in enumerate(zip(request.logprobs, output)):
            at = logits[len(prompt) + i - 1]
            want = log_softmax(at) if is_raw else drawn_from(at, params, prompt, output[:i])
            check(entry, token, want, params.logprobs)
            count += 1
    else:
        assert request.logprobs == []
    if params.prompt_logprobs is not None:
        first, *entries = request.prompt_logprobs
        assert first is None
        assert len(entries) == len(prompt) - 1
        for i, entry in enumerate(entries, 1):
            at = logits[i - 1]
            want = log_softmax(at) if is_raw else drawn_from(at, params, prompt[:i], [])
            check(entry, prompt[i], want, params.prompt_logprobs)
            count += 1
    else:
        assert request.prompt_logprobs == []
    return count


PROCESSED = {"logprobs_mode": "processed"}
JOBS = [
    (1, asking(5, prompt_logprobs=3)),
    (150, asking(20, prompt_logprobs=5, temperature=0.0)),
    (9, asking(None)),
    (16, asking(0, temperature=2.0)),
    (17, asking(3, temperature=0.7, top_k=20, top_p=0.9, **PROCESSED)),
    (65, asking(None, prompt_logprobs=0, top_p=0.5)),
    (64, asking(20, prompt_logprobs=20, repetition_penalty=1.8, min_p=0.01, **PROCESSED)),
    (33, asking(1, temperature=0.0, **PROCESSED)),
    (2, asking(7, prompt_logprobs=1, logit_bias={7: 5.0}, bad_words=[[9]], **PROCESSED)),
    (5, asking(2, presence_penalty=2.0, frequency_penalty=1.0, stop_token_ids=range(0, V, 40))),
    (40, asking(4, allowed_token_ids=range(3, 300), min_tokens=4, stop_token_ids=[9], **PROCESSED)),
    (12, GREEDY),
]


def jobs():
    return [(prompt_of(length), params) for length, params in JOBS]


def test_they_are_those_of_a_full_recomputation(engine, logits_of):
    """Twelve requests at once on eight rows, prompts of up to three chunks, windows of four."""
    requests = run(engine, jobs())
    counts = [check_request(request, logits_of) for request in requests]
    assert sum(counts) > 300
    assert counts[2] == counts[11] == 0


def test_each_request_gets_what_it_gets_alone(engine):
    together = run(engine, jobs())
    for request, job in zip(together, jobs()):
        (alone,) = run(engine, [job])
        assert result(request) == result(alone)
        pairs = [
            *zip(request.logprobs, alone.logprobs, strict=True),
            *zip(request.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True),
        ]
        for one, other in pairs:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-5)


def test_asking_changes_no_token(engine, alone):
    for prompt, params in jobs():
        plain = params.replace(logprobs=None, prompt_logprobs=None, logprobs_mode="raw")
        (request,) = run(engine, [(prompt, params)])
        assert result(request) == alone(prompt, plain)


def test_who_asks_for_what_compiles_nothing_new(engine):
    run(engine, jobs()[:2])
    compiled = []

    def listen(event, duration, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert compiled, "the listener hears nothing"
        compiled.clear()
        run(engine, jobs())
        run(engine, jobs()[::-1])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


@pytest.fixture
def fetched(engine, monkeypatch):
    """How many arrays each fetch of the engine brought."""
    sizes = []
    fetch = engine._executor.fetch

    def count(results):
        sizes.append(len(jax.tree.leaves(results)))
        return fetch(results)

    monkeypatch.setattr(engine._executor, "fetch", count)
    return sizes


def test_they_are_fetched_for_those_who_ask_alone(engine, fetched):
    """Tokens alone; tokens and three arrays; of a prompt three arrays for each of its chunks."""
    run(engine, [(prompt_of(9), GREEDY), (prompt_of(70), GREEDY)])
    assert set(fetched) == {1}
    fetched.clear()
    run(engine, [(prompt_of(9), GREEDY.replace(logprobs=0))])
    assert set(fetched) == {4}
    fetched.clear()
    run(engine, [(prompt_of(150), GREEDY.replace(prompt_logprobs=0))])
    assert fetched == [3, 3, 4, *[1] * (len(fetched) - 3)]
    fetched.clear()
    run(engine, [(prompt_of(1), GREEDY.replace(prompt_logprobs=5))])
    assert set(fetched) == {1}, "a lone token has nothing before it"


def test_outputs_carry_them_and_those_of_the_prompt_come_first(engine):
    params = SCRIPTED.replace(logprobs=2, prompt_logprobs=0, max_tokens=10)
    request = engine.add_request(prompt_of(130), params)
    brought = []
    while engine.has_work:
        for output in engine.step():
            assert len(request.prompt_logprobs) == 130
            assert [entry.token_id for entry in output.logprobs] == list(output.new_ids)
            brought += output.logprobs
    assert len(brought) == 10
    assert brought == request.logprobs
    engine.add_request(prompt_of(3), GREEDY)
    while engine.has_work:
        assert all(output.logprobs == () for output in engine.step())


def test_every_length_of_prompt(engine, logits_of):
    """1 to 70 tokens of one text: what comes later changes nothing."""
    ids = prompt_of(70)
    want = log_softmax(logits_of(ids))[np.arange(69), ids[1:]]
    params = asking(prompt_logprobs=0, max_tokens=1, temperature=0.0)
    requests = run(engine, [(ids[:length], params) for length in range(1, 71)])
    for length, request in enumerate(requests, 1):
        assert request.prompt_logprobs[0] is None
        scores = [entry.logprob for entry in request.prompt_logprobs[1:]]
        assert scores == pytest.approx(want[: length - 1].tolist(), abs=1e-4)


@pytest.mark.parametrize("tokens", [9, 16, 23])
def test_every_chunk_size_gives_the_same(make_engine, engine, tokens):
    """As chunks of 64, of which the last is short."""
    other = make_engine(host={"token_budget": tokens})
    lengths = note_chunks(other)
    for mode in ("raw", "processed"):
        params = asking(2, prompt_logprobs=4, top_k=9, frequency_penalty=1.0, max_tokens=1)
        job = prompt_of(150), params.replace(logprobs_mode=mode)
        (wanted,), (got,) = run(engine, [job]), run(other, [job])
        assert result(got) == result(wanted)
        for one, same in zip(
            [*got.logprobs, *got.prompt_logprobs[1:]],
            [*wanted.logprobs, *wanted.prompt_logprobs[1:]],
            strict=True,
        ):
            assert one.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert list(one.top.values()) == pytest.approx(list(same.top.values()), abs=1e-4)
    whole, rest = divmod(150, tokens)
    assert lengths == 2 * [*[tokens] * whole, rest]


def test_what_was_generated_scores_as_it_was_when_it_is_a_prompt(engine):
    (first,) = run(engine, [(prompt_of(50), asking(3, temperature=1.5, max_tokens=20))])
    ids = [*first.prompt_ids, *first.output_ids]
    twice = run(engine, [(ids, asking(prompt_logprobs=3, max_tokens=1))])
    twice += run(engine, [(ids, asking(prompt_logprobs=3, max_tokens=1))])
    assert twice[0].prompt_logprobs == twice[1].prompt_logprobs, "one prompt twice, bit for bit"
    scored = twice[0].prompt_logprobs[50:]
    assert len(scored) == len(first.logprobs) > 5
    for one, other in zip(scored, first.logprobs):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)


def test_what_can_not_be_sampled_is_minus_infinity(engine):
    params = asking(3, prompt_logprobs=3, temperature=0.0, max_tokens=2, **PROCESSED)
    (request,) = run(engine, [([7, 7, 7, 7], params)])
    for entry in request.logprobs:
        assert (entry.logprob, list(entry.top.values())) == (0.0, [0.0, -math.inf, -math.inf])
        assert next(iter(entry.top)) == entry.token_id
    for entry in request.prompt_logprobs[1:]:
        assert entry.logprob == (0.0 if next(iter(entry.top)) == 7 else -math.inf)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_than_the_engine_has_is_refused_and_nothing_is_lost(engine, alone, field):
    job = prompt_of(6), GREEDY
    before = engine.add_request(*job)
    with pytest.raises(ValueError, match=f"{field}=21, more than max_logprobs=20. Ask for fewer"):
        engine.add_request(prompt_of(4), GREEDY.replace(**{field: 21}))
    drain(engine)
    assert result(before) == alone(*job)
    run(engine, [(prompt_of(4), GREEDY.replace(**{field: 20}))])


def test_no_more_than_the_ids_that_there_are(make_engine):
    engine = make_engine(num_valid_ids=8, eos_ids=[])
    with pytest.raises(ValueError, match="logprobs=9 exceeds the 8 ids of the model"):
        engine.add_request([3], asking(9))
    (request,) = run(engine, [([3, 7, 5], asking(8, prompt_logprobs=8))])
    for entry in [*request.logprobs, *request.prompt_logprobs[1:]]:
        assert set(entry.top) == set(range(8))
        assert sum(map(math.exp, entry.top.values())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("max_logprobs", [-1, 129, None, 2.0])
def test_how_many_there_may_be_has_limits(max_logprobs):
    with pytest.raises(ValueError, match=r"max_logprobs=.* must be an integer in 0 \.\. 128"):
        EngineConfig(max_logprobs=max_logprobs)


def test_requests_cancelled_at_any_step_leave_nothing_behind(engine):
    params = asking(2, prompt_logprobs=2, max_tokens=20, ignore_eos=True)
    for steps in range(7):
        cancelled = engine.add_request(prompt_of(150), params)
        other = engine.add_request(prompt_of(5), params)
        for _ in range(steps):
            engine.step()
        engine.cancel(cancelled.id)
        drain(engine)
        assert len(cancelled.logprobs) == len(cancelled.output_ids)
        assert len(other.logprobs) == len(other.output_ids) == 20
        assert len(other.prompt_logprobs) == 5
    assert engine.scheduler.shards[0].pool.num_available == CONFIG.num_pages


def test_the_compiled_scores_hold_no_logits_of_a_chunk(programs, wide):
    """64 states of 1000 ids are scored 16 at a time; the states themselves are 16 KB."""
    score, _ = programs
    temporaries = score["score",].memory_analysis().temp_size_in_bytes
    assert 16 * V * 4 < temporaries < 9 * 16 * V * 4

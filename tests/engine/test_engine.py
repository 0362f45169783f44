"""What the engine gives each request: what pure generation gives it, whoever else is served."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer import CacheConfig, SamplingParams
from jaxinfer.compute import (
    PrefillBatch,
    decode_step,
    init_cache,
    make_sampling_state,
    prefill_step,
    start_decode,
)

from .serving import (
    EOS,
    GREEDY,
    SCRIPT,
    SCRIPTED,
    V,
    assert_same_logprobs,
    drain,
    prompt_of,
    result,
    results,
    run,
    script,
)


def sampling(**fields):
    return SamplingParams(**{"max_tokens": 12, **fields})


EVERY_PARAMETER = [
    (1, GREEDY),
    (5, sampling(seed=1)),
    (16, sampling(seed=2, temperature=0.7, top_p=0.9)),
    (17, sampling(seed=3, top_k=5, max_tokens=1)),
    (32, sampling(seed=-4, temperature=1.5, min_p=0.05)),
    (33, sampling(temperature=0.0, repetition_penalty=1.7)),
    (8, sampling(temperature=0.0, presence_penalty=2.0)),
    (9, sampling(temperature=0.0, frequency_penalty=1.5)),
    (45, sampling(seed=5, logit_bias={7: 4.0, 9: -100.0, 999: 3.0})),
    (48, sampling(seed=6, allowed_token_ids=range(100, 140))),
    (3, sampling(seed=7, logit_bias={EOS: 50.0}, min_tokens=3)),
    (20, sampling(seed=8, stop_token_ids=range(0, 1000, 33))),
    (12, sampling(seed=9, logit_bias={EOS: 50.0}, ignore_eos=True)),
    (40, sampling(seed=10, bad_words=[[5], [6, 7]], temperature=1e6)),
    (2, SCRIPTED),
    (31, SCRIPTED.replace(stop_token_ids=[SCRIPT[6]])),
]


def test_outputs_equal_pure_generation(engine, oracle):
    """Sixteen requests, each with parameters of its own, on eight rows and 24 pages.

    The oracle has neither rows, pages, chunks nor windows: it recomputes every token.
    """
    jobs = [(prompt_of(length), params) for length, params in EVERY_PARAMETER]
    got = results(run(engine, jobs))
    assert got == [oracle(prompt, params) for prompt, params in jobs]
    assert {reason for _, reason in got} == {"stop", "length"}


def test_steps_in_a_users_own_scan_equal_the_engine(wide, engine):
    """Three lengths and three seeds in one prefill, then a scan of decode steps."""
    prompts = [prompt_of(n) for n in (3, 16, 9)]
    params = [sampling(seed=seed, max_tokens=16) for seed in (1, 2, 3)]

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(weights, cache, batch, state):
        cache, first = prefill_step(wide.model, weights, cache, batch, state, logits_hook=script)
        state = start_decode(batch, state, first.tokens_BW[:, 0], jnp.full(3, 16, jnp.int32))

        def body(carry, _):
            *carry, output = decode_step(wide.model, weights, *carry, logits_hook=script)
            return tuple(carry), output.tokens_BW[:, 0]

        (cache, _), rest_WB = lax.scan(body, (cache, state), length=15)
        return cache, jnp.concatenate([first.tokens_BW, rest_WB.T], axis=1)

    tokens_BT = np.zeros((3, 16), np.int32)
    for row, prompt in zip(tokens_BT, prompts):
        row[: len(prompt)] = prompt
    lens_B = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    table_BM = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    cache = init_cache(wide.model.config, CacheConfig(num_pages=12, page_size=8, dtype="float32"))
    state = make_sampling_state(params, prompts, vocab_size=V, eos_ids=[EOS])
    batch = PrefillBatch(jnp.asarray(tokens_BT), lens_B, lens_B, table_BM)
    _, got = loop(wide.params, cache, batch, state)
    alone = [run(engine, [job])[0].output_ids for job in zip(prompts, params)]
    assert [[t for t in row if t >= 0] for row in np.asarray(got).tolist()] == alone


@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_every_batch_size_and_order_gives_the_same(engine, make_engine, order):
    lengths = [1, 7, 16, 33, 1, 7, 16, 33]
    params = GREEDY.replace(max_tokens=6, logprobs=20)
    jobs = [(prompt_of(n, i), params) for i, n in enumerate(lengths)]
    if order != "up":
        jobs = jobs[::-1] if order == "down" else jobs[::3] + jobs[1::3] + jobs[2::3]
    quiet = make_engine(host={"prefix_cache": False})
    alone = [run(quiet, [job])[0] for job in jobs]
    for size in range(1, 9):
        for request, solo in zip(run(engine, jobs[:size]), alone):
            assert result(request) == result(solo)
            assert_same_logprobs(request, solo)


def test_requests_may_join_at_any_step(engine, alone):
    jobs = [(prompt_of(n), sampling(seed=n)) for n in (40, 3, 17, 5, 33, 8)]
    requests = []
    for prompt, params in jobs:
        requests.append(engine.add_request(prompt, params))
        engine.step()
        engine.check_integrity()
    drain(engine)
    assert results(requests) == [alone(*job) for job in jobs]


def test_two_requests_of_one_batch_keep_their_own_parameters(engine, alone):
    prompt = prompt_of(11)
    jobs = [
        (prompt, sampling(temperature=0.5, top_p=0.8, seed=1, stop_token_ids=range(3, 34))),
        (prompt, sampling(temperature=2.0, top_p=0.95, seed=2, stop_token_ids=range(500, 531))),
    ]
    got = results(run(engine, jobs))
    assert got == [alone(*job) for job in jobs]
    assert got[0] != got[1]


def test_the_hook_decides_the_output_in_prefill_and_windows(engine):
    (request,) = run(engine, [(prompt_of(5), SCRIPTED.replace(max_tokens=30))])
    assert tuple(request.output_ids) == SCRIPT[:30]


def test_new_ids_arrive_in_windows_and_join_to_the_output(engine):
    request = engine.add_request(prompt_of(5), SCRIPTED.replace(max_tokens=10))
    (brought,) = drain(engine).values()
    assert [len(ids) for ids, _ in brought] == [1, 1, 4, 4]
    assert [reason for _, reason in brought] == [None, None, None, "length"]
    assert sum((ids for ids, _ in brought), ()) == tuple(request.output_ids) == SCRIPT[:10]


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_the_output_has_exactly_max_tokens(engine, max_tokens):
    (request,) = run(engine, [(prompt_of(7), SCRIPTED.replace(max_tokens=max_tokens))])
    assert result(request) == (list(SCRIPT[:max_tokens]), "length")


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_a_stop_id_exactly_at_the_limit_is_a_stop(engine, max_tokens):
    ids = SCRIPT[:max_tokens]
    params = SCRIPTED.replace(max_tokens=max_tokens, stop_token_ids=[ids[-1]])
    (request,) = run(engine, [(prompt_of(7), params)])
    assert result(request) == (list(ids), "stop")


@pytest.mark.parametrize("eos", [2, 7])
def test_any_of_several_eos_ids_stops(make_engine, eos):
    engine = make_engine(eos_ids=[2, 7])
    params = GREEDY.replace(logit_bias={eos: 1e3}, min_tokens=2)
    (request,) = run(engine, [(prompt_of(5), params)])
    assert len(request.output_ids) == 3
    assert not {2, 7} & set(request.output_ids[:2])
    assert (request.output_ids[2], request.finish_reason) == (eos, "stop")


def test_eos_ids_of_the_model_count_unless_ignored(engine):
    params = GREEDY.replace(logit_bias={EOS: 1e3})
    stopped, ignoring = run(
        engine, [(prompt_of(5), params), (prompt_of(5), params.replace(ignore_eos=True))]
    )
    assert result(stopped) == ([EOS], "stop")
    assert result(ignoring) == ([EOS] * 12, "length")


def test_min_tokens_holds_back_a_preferred_eos(engine):
    params = GREEDY.replace(logit_bias={EOS: 1e3}, min_tokens=5)
    (request,) = run(engine, [(prompt_of(9), params)])
    assert EOS not in request.output_ids[:5]
    assert (len(request.output_ids), request.finish_reason) == (6, "stop")


def test_the_stop_of_one_row_stops_no_other(engine):
    stops = [SCRIPT[n] for n in (0, 1, 4, 5, 8)]
    jobs = [(prompt_of(4), SCRIPTED.replace(stop_token_ids=[stop])) for stop in stops]
    jobs.append((prompt_of(4), SCRIPTED))
    requests = run(engine, jobs)
    assert [len(r.output_ids) for r in requests] == [1, 2, 5, 6, 9, 12]
    assert [r.finish_reason for r in requests] == ["stop"] * 5 + ["length"]
    assert all(tuple(r.output_ids) == SCRIPT[: len(r.output_ids)] for r in requests)


def test_noise_is_new_at_every_step(make_engine, wide):
    """64 draws from flat logits over 1000 ids: 62 distinct ones on average."""
    flat = make_engine(params=wide.flat_params, eos_ids=[])
    params = sampling(max_tokens=64, seed=3)
    seeded, again = run(flat, [(prompt_of(9), params)] * 2)
    assert len(set(seeded.output_ids)) >= 55
    assert seeded.output_ids == again.output_ids
    one, other = run(flat, [(prompt_of(9), params.replace(seed=None))] * 2)
    assert one.output_ids != other.output_ids
    assert one.seed != other.seed
    (repeated,) = run(flat, [(prompt_of(9), params.replace(seed=one.seed))])
    assert repeated.output_ids == one.output_ids


def test_a_seed_means_the_same_alone_and_in_a_batch(make_engine, wide):
    flat = make_engine(params=wide.flat_params, eos_ids=[])
    jobs = [(prompt_of(6), sampling(seed=seed, max_tokens=3)) for seed in (1, 2, 3)]
    jobs += [
        (prompt_of(6, 1), sampling(seed=42, max_tokens=3)),
        (prompt_of(6, 2), sampling(seed=42, max_tokens=3)),
    ]
    together = results(run(flat, jobs))
    assert together == [result(run(flat, [job])[0]) for job in jobs]
    assert len({ids[0] for ids, _ in together}) == 5, (
        "one seed over two prompts, or two seeds, agree"
    )


@pytest.mark.parametrize("name, value", [("presence_penalty", 2.0), ("frequency_penalty", 2.0)])
def test_penalties_change_what_repeats(engine, name, value):
    """A bias of 1.5 to one id makes it win every time, unless what was produced is penalised."""
    params = GREEDY.replace(logit_bias={500: 100.0}, max_tokens=3)
    plain = params.replace(logit_bias={500: 100.0, 501: 98.5})
    jobs = [(prompt_of(5), plain), (prompt_of(5), plain.replace(**{name: value}))]
    assert [r.output_ids for r in run(engine, jobs)] == [[500, 500, 500], [500, 501, 500]]


def test_repetition_penalty_counts_the_prompt_and_presence_does_not(engine):
    base = GREEDY.replace(logit_bias={500: 100.0, 501: 98.5}, max_tokens=1)
    jobs = [
        ([500, 9, 9], base.replace(presence_penalty=2.0)),
        ([500, 9, 9], base.replace(repetition_penalty=1.2)),
    ]
    assert [r.output_ids for r in run(engine, jobs)] == [[500], [501]]


def test_bad_words_never_appear(engine, alone):
    prompt = prompt_of(14)
    (first, second, *_), _ = alone(prompt, GREEDY)
    (banned, pair) = run(
        engine,
        [
            (prompt, GREEDY.replace(bad_words=[[first]])),
            (prompt, GREEDY.replace(bad_words=[[first, second]])),
        ],
    )
    assert first not in banned.output_ids
    assert pair.output_ids[0] == first
    assert (first, second) not in set(zip(pair.output_ids, pair.output_ids[1:]))


def test_padding_of_the_head_is_never_produced_nor_taken(make_engine, wide):
    engine = make_engine(params=wide.flat_params, num_valid_ids=8, eos_ids=[])
    (request,) = run(engine, [([3, 7], sampling(max_tokens=40, seed=0))])
    assert set(request.output_ids) == set(range(8))
    with pytest.raises(ValueError, match=r"token id 8; the model has ids 0\.\.7"):
        engine.add_request([8], GREEDY)
    with pytest.raises(ValueError, match=r"stop_token_ids holds token id 8, but ids end at 7"):
        engine.add_request([3], GREEDY.replace(stop_token_ids=[8]))


def test_times_of_a_request_are_in_order(engine):
    (request,) = run(engine, [(prompt_of(5), GREEDY)])
    times = request.times
    assert times.arrival < times.first_scheduled < times.first_token < times.last_token

"""Log-probabilities of sampled tokens, against plain float64 sums."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import CacheConfig
from jaxinfer.compute import (
    decode_step,
    decode_window,
    init_cache,
    make_prefill_batch,
    make_sampling_state,
    prefill_step,
    start_decode,
)
from jaxinfer.compute.cutoff import TOP_P_SLACK
from jaxinfer.compute.logprobs import token_logprobs
from jaxinfer.compute.sampling import draw
from jaxinfer.compute.vocabulary import SLICE
from jaxinfer.sampling_params import SamplingParams

from . import sampling_oracle as oracle

ROWS, V, C = 6, 272, 20
RAW = SamplingParams(logprobs=C, seed=0)
PROCESSED = RAW.replace(logprobs_mode="processed")


@pytest.fixture(scope="module")
def traced():
    """The shapes that `find` was traced for."""
    return []


@pytest.fixture(scope="module")
def find(traced):
    """A function from logits and state to (tokens, `Logprobs`) as numpy arrays, compiled."""

    @functools.partial(jax.jit, static_argnames="max_logprobs")
    def both(logits_BV, state, positions_B, max_logprobs):
        traced.append((logits_BV.shape, max_logprobs))
        tokens_B, drawn_from = draw(logits_BV, state, positions_B)
        found = token_logprobs(logits_BV, tokens_B, drawn_from, state, max_logprobs=max_logprobs)
        return tokens_B, found

    def call(logits_BV, state, start=7, max_logprobs=C):
        positions_B = np.arange(start, start + len(logits_BV), dtype=np.int32)
        return jax.device_get(both(logits_BV, state, positions_B, max_logprobs))

    return call


def state_of(params, vocab=V, **more):
    prompts = more.pop("prompts", [[1]] * len(params))
    return make_sampling_state(params, prompts, vocab_size=vocab, **more)


def logits_of(seed, rows=ROWS, vocab=V, spread=3.0):
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((rows, vocab))).astype(np.float32)


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def ranked(log_probs):
    """All ids, the most likely first, of equals the lower."""
    return sorted(range(len(log_probs)), key=lambda v: (-log_probs[v], v))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_raw_is_the_log_softmax_of_the_logits_at_any_temperature(find, temperature):
    params = [
        RAW.replace(temperature=temperature, top_k=k, presence_penalty=1.0, seed=k)
        for k in range(ROWS)
    ]
    logits = logits_of(0)
    tokens, found = find(logits, state_of(params))
    want = log_softmax(logits)
    for row in range(ROWS):
        best = ranked(want[row])[:C]
        assert found.top_ids[row].tolist() == best
        np.testing.assert_allclose(found.top[row], want[row, best], atol=1e-5, rtol=0)
        np.testing.assert_allclose(found.chosen[row], want[row, tokens[row]], atol=1e-5, rtol=0)
    assert (found.chosen.dtype, found.top.dtype) == (np.float32, np.float32)


SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05, "logit_bias": {5: 4.0, 7: -3.0}},
    {"top_k": 7, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"top_k": 150, "top_p": 0.99, "bad_words": [[3], [9]], "presence_penalty": -1.0},
    {"allowed_token_ids": [4, 9, 11, 200], "min_tokens": 5, "stop_token_ids": [9]},
]


def test_processed_is_the_distribution_that_is_sampled(find):
    params = [PROCESSED.replace(seed=row, **fields) for row, fields in enumerate(SAMPLED)]
    prompts, outputs = [[1, 2, 3]] * ROWS, [[4, 4, 9]] * ROWS
    for seed in range(3):
        logits = logits_of(seed)
        state = state_of(params, prompts=prompts, outputs=outputs, eos_ids=[0])
        tokens, found = find(logits, state, start=seed)
        for row, p in enumerate(params):
            processed = oracle.process(logits[row], p, prompts[row], outputs[row], eos_ids=[0])
            probs = oracle.distribution(processed, p, slack=float(TOP_P_SLACK))
            assert found.top_ids[row].tolist() == ranked(probs)[:C]
            np.testing.assert_allclose(np.exp(found.top[row]), probs[ranked(probs)[:C]], atol=1e-5)
            np.testing.assert_allclose(np.exp(found.chosen[row]), probs[tokens[row]], atol=1e-5)
            assert np.isfinite(found.top[row]).tolist() == (probs[ranked(probs)[:C]] > 0).tolist()
    assert found.chosen[0] == found.top[0, 0] == 0, "greedy is certain"


def test_modes_and_who_asks_differ_from_row_to_row_of_one_program(find, traced):
    """Each row as in a batch where all ask for what it asks, bit for bit."""
    logits = logits_of(3)
    both = []
    for params in (RAW, PROCESSED):
        rows = [params.replace(temperature=0.5, top_k=9, seed=row) for row in range(ROWS)]
        both.append(find(logits, state_of(rows)))
    count = len(traced)
    asked = [0, 1, 0, None, 1, None]
    rows = [
        RAW.replace(
            temperature=0.5,
            top_k=9,
            seed=row,
            logprobs=None if mode is None else row,
            logprobs_mode="processed" if mode else "raw",
        )
        for row, mode in enumerate(asked)
    ]
    tokens, found = find(logits, state_of(rows))
    assert len(traced) == count
    for row, mode in enumerate(asked):
        if mode is not None:
            wanted_tokens, wanted = both[mode]
            assert tokens[row] == wanted_tokens[row]
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
                np.testing.assert_array_equal(one[row], other[row])
    assert not np.allclose(both[0][1].top, both[1][1].top)


def test_nobody_pays_where_nobody_asks(find):
    _, found = find(logits_of(4), state_of([RAW.replace(logprobs=None)] * ROWS))
    assert all(not leaf.any() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("params", [RAW, PROCESSED], ids=["raw", "processed"])
def test_a_row_alone_equals_the_row_in_a_batch(find, params):
    """Over a vocabulary of several slices, of which the last repeats a part of the one before."""
    vocab = 2 * SLICE + 1000
    rows = [params.replace(temperature=0.1 + row, seed=row) for row in range(3)]
    logits = logits_of(5, 3, vocab)
    tokens, together = find(logits, state_of(rows, vocab))
    want = log_softmax(logits / ([[0.1], [1.1], [2.1]] if params is PROCESSED else 1))
    for row in range(3):
        np.testing.assert_allclose(
            together.chosen[row], want[row, tokens[row]], atol=2e-5, rtol=1e-6
        )
        _, alone = find(logits[row : row + 1], state_of(rows[row : row + 1], vocab), start=7 + row)
        for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together)):
            np.testing.assert_array_equal(one[0], other[row])


def test_the_chosen_token_is_there_outside_the_top(find):
    params = [RAW.replace(temperature=1e6, seed=row) for row in range(ROWS)]
    logits = logits_of(6)
    tokens, found = find(logits, state_of(params), max_logprobs=1)
    want = log_softmax(logits)[np.arange(ROWS), tokens]
    assert (tokens != found.top_ids[:, 0]).all()
    np.testing.assert_allclose(found.chosen, want, atol=1e-5)
    same, none = find(logits, state_of(params), max_logprobs=0)
    assert same.tolist() == tokens.tolist()
    np.testing.assert_array_equal(none.chosen, found.chosen)
    assert none.top.shape == none.top_ids.shape == (ROWS, 0)


@pytest.mark.parametrize("params", [RAW, PROCESSED], ids=["raw", "processed"])
def test_all_together_are_one_and_padding_of_the_head_is_never_among_them(find, params):
    """260 ids in a head of 272 columns, of which the last has the largest logit of all."""
    logits = logits_of(7)
    logits[:, 271] = 50.0
    rows = [params.replace(temperature=1.0 + row, seed=row) for row in range(ROWS)]
    tokens, found = find(logits, state_of(rows, num_valid_ids=260), max_logprobs=V)
    assert (tokens < 260).all()
    for row in range(ROWS):
        assert sorted(found.top_ids[row, :260].tolist()) == list(range(260))
        assert (found.top[row, 260:] == -np.inf).all()
    np.testing.assert_allclose(np.exp(found.top).sum(-1), 1, atol=1e-6)


def test_equal_logits_stand_in_order_of_ids_and_zeros_are_equal(find):
    logits = np.zeros((ROWS, V), np.float32)
    logits[:, 0] = -0.0
    logits[0] = np.repeat([0.0, 1.0], V // 2)
    _, found = find(logits, state_of([RAW] * ROWS))
    assert found.top_ids[0].tolist() == list(range(V // 2, V // 2 + C))
    assert found.top_ids[1].tolist() == list(range(C))
    np.testing.assert_allclose(found.top[1], -np.log(V), rtol=1e-6)


def test_a_vocabulary_smaller_than_the_table_leaves_the_rest_of_it_empty(find):
    logits = logits_of(8, 2, 5)
    _, found = find(logits, state_of([RAW.replace(logprobs=5)] * 2, 5))
    assert found.top_ids[:, 5:].tolist() == [[-1] * (C - 5)] * 2
    assert (found.top[:, 5:] == -np.inf).all()
    np.testing.assert_allclose(np.exp(found.top).sum(-1), 1, atol=1e-6)


def test_logits_far_from_zero_lose_no_digits(find):
    """A log-softmax that adds the largest to the log of the sum would round to 1e-3 here."""
    logits = (logits_of(9) + 20000).astype(np.float32)
    tokens, found = find(logits, state_of([RAW] * ROWS))
    want = log_softmax(logits)[np.arange(ROWS), tokens]
    np.testing.assert_allclose(found.chosen, want, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def rows(tiny_llama):
    """A prefill of two prompts, ready for a step: (prefill, start), functions of nothing."""
    prompts = [tiny_llama.refs["prompt_ids"][:n].tolist() for n in (9, 4)]
    batch = make_prefill_batch(prompts, max_tokens=16, page_size=8)
    params = [
        RAW.replace(temperature=1.5, seed=3, ignore_eos=True),
        PROCESSED.replace(top_k=3, seed=4, ignore_eos=True),
    ]
    sampling = make_sampling_state(params, prompts, vocab_size=256, eos_ids=[2])
    cache_config = CacheConfig(num_pages=batch.page_table_BM.size, page_size=8, dtype="float32")
    step = functools.partial(prefill_step, tiny_llama.model, return_logits=True, max_logprobs=C)
    prefill = jax.jit(step)

    def run():
        cache = init_cache(tiny_llama.model.config, cache_config)
        cache, output = prefill(tiny_llama.params, cache, batch, sampling)
        first_B = output.tokens_BW[:, 0]
        return cache, start_decode(batch, sampling, first_B, jnp.array([16, 3])), output

    return run


def test_steps_give_those_of_the_tokens_that_they_sample(tiny_llama, rows):
    """Raw in the first row; of the three tokens that stay in the second, until its budget ends."""
    step = jax.jit(
        functools.partial(decode_step, tiny_llama.model, return_logits=True, max_logprobs=C)
    )
    cache, state, output = rows()
    outputs = [output]
    for _ in range(4):
        cache, state, output = step(tiny_llama.params, cache, state)
        outputs.append(output)
    for number, output in enumerate(outputs):
        found = jax.device_get(output.logprobs)
        assert found.chosen.shape == (2, 1)
        assert found.top.shape == found.top_ids.shape == (2, 1, C)
        want = log_softmax(output.logits_BV[0])
        np.testing.assert_allclose(found.chosen[0, 0], want[output.tokens_BW[0, 0]], atol=1e-5)
        np.testing.assert_allclose(found.top[0, 0], want[found.top_ids[0, 0]], atol=1e-5)
        if number < 3:
            assert np.isfinite(found.top[1, 0]).sum() == 3
            kept = log_softmax(np.sort(np.asarray(output.logits_BV[1]))[-3:])
            np.testing.assert_allclose(found.top[1, 0, :3], kept[::-1], atol=1e-5)
        else:
            assert output.tokens_BW[1, 0] == -1
    window = jax.jit(
        functools.partial(decode_window, tiny_llama.model, max_steps=6, max_logprobs=C)
    )
    *_, output = window(tiny_llama.params, *rows()[:2], 4)
    singles = [out.tokens_BW for out in outputs[1:]]
    np.testing.assert_array_equal(output.tokens_BW[:, :4], np.concatenate(singles, 1))
    is_token_BW = np.asarray(output.tokens_BW[:, :4]) >= 0
    assert is_token_BW.sum() == 6
    for name in ("chosen", "top_ids", "top"):
        got = np.asarray(getattr(output.logprobs, name))[:, :4][is_token_BW]
        steps = [np.asarray(getattr(out.logprobs, name)) for out in outputs[1:]]
        np.testing.assert_array_equal(got, np.concatenate(steps, 1)[is_token_BW])


def test_without_max_logprobs_there_are_none(tiny_llama, rows):
    cache, state, _ = jax.eval_shape(rows)
    for step in (decode_step, functools.partial(decode_window, num_steps=2)):
        *_, output = jax.eval_shape(
            functools.partial(step, tiny_llama.model), tiny_llama.params, cache, state
        )
        assert output.logprobs is None
        assert output.logits_BV is None
    sampling = dataclasses.replace(state.sampling)
    batch = make_prefill_batch([[1], [2]], max_tokens=1, page_size=8)
    step = functools.partial(prefill_step, tiny_llama.model)
    _, output = jax.eval_shape(step, tiny_llama.params, cache, batch, sampling)
    assert output.logprobs is None

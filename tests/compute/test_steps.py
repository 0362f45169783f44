"""The pure steps: rows share nothing, windows are steps, every buffer is updated in place."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import CacheConfig, SamplingParams
from jaxinfer.compute import (
    KVCache,
    PrefillBatch,
    decode_step,
    decode_window,
    init_cache,
    make_sampling_state,
    prefill_step,
    start_decode,
)

V, EOS, B, T, PAGE, MAX_STEPS = 256, 2, 5, 45, 8, 8
# Rows own seven pages each, scattered over 40; five pages belong to nobody.
TABLE_BM = np.random.default_rng(0).permutation(40)[: 7 * B].reshape(B, 7).astype(np.int32)
NUM_PAGES = 40
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def steps(tiny_llama):
    """The three steps, jitted as a user would: the cache and the state donated."""
    traced = []

    def window(params, cache, state, num_steps):
        traced.append("window")
        return decode_window(tiny_llama.model, params, cache, state, num_steps, max_steps=MAX_STEPS)

    prefill = functools.partial(prefill_step, tiny_llama.model, return_logits=True)
    step = functools.partial(decode_step, tiny_llama.model, return_logits=True)
    return SimpleNamespace(
        params=tiny_llama.params,
        prompt_ids=tiny_llama.refs["prompt_ids"],
        prefill=jax.jit(prefill, donate_argnums=1),
        start=jax.jit(start_decode),
        step=jax.jit(step, donate_argnums=(1, 2)),
        window=jax.jit(window, donate_argnums=(1, 2)),
        traced=traced,
        new_cache=lambda: init_cache(
            tiny_llama.model.config,
            CacheConfig(num_pages=NUM_PAGES, page_size=PAGE, dtype="float32"),
        ),
    )


LENGTHS = (1, 7, 16, 33, 40)


def batch_of(steps, lengths=LENGTHS, starts=(0,) * B, ids=None):
    """Tokens starts[b]..lengths[b]-1 of `ids`, if not of the prompt, in each row; none where they
    are equal.
    """
    ids = steps.prompt_ids if ids is None else ids
    tokens_BT = np.zeros((B, T), np.int32)
    for row, start, end in zip(tokens_BT, starts, lengths):
        row[: end - start] = ids[start:end]
    lengths, starts = np.array(lengths, np.int32), np.array(starts, np.int32)
    return PrefillBatch(tokens_BT, lengths - starts, lengths, TABLE_BM)


def sampling_of(steps, params=GREEDY, lengths=LENGTHS):
    rows = [params] * B if isinstance(params, SamplingParams) else params
    prompts = [steps.prompt_ids[:n].tolist() for n in lengths]
    state = make_sampling_state(rows, prompts, vocab_size=V, eos_ids=[EOS])
    return jax.tree.map(jnp.asarray, state)


def started(steps, params=GREEDY, max_tokens=20, lengths=LENGTHS):
    """`(cache, state, first tokens)` of rows that are ready to decode."""
    batch, sampling = batch_of(steps, lengths), sampling_of(steps, params, lengths)
    cache, output = steps.prefill(steps.params, steps.new_cache(), batch, sampling)
    max_tokens_B = jnp.broadcast_to(jnp.asarray(max_tokens, jnp.int32), (B,))
    first_B = output.tokens_BW[:, 0]
    state = steps.start(batch, sampling, first_B, max_tokens_B)
    return cache, state, np.asarray(first_B)


def run_steps(steps, cache, state, count):
    """Each row's tokens, -1 included, and the logits of `count` single steps."""
    tokens, logits = [], []
    for _ in range(count):
        cache, state, output = steps.step(steps.params, cache, state)
        tokens.append(np.asarray(output.tokens_BW)[:, 0])
        logits.append(np.asarray(output.logits_BV))
    return cache, state, np.stack(tokens, 1), np.stack(logits, 1)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_each_row_of_one_prefill_gives_what_it_gives_alone(steps, params):
    sampling = sampling_of(steps, params)
    _, together = steps.prefill(steps.params, steps.new_cache(), batch_of(steps), sampling)
    for b in range(B):
        only = [length if row == b else 0 for row, length in enumerate(LENGTHS)]
        _, alone = steps.prefill(steps.params, steps.new_cache(), batch_of(steps, only), sampling)
        tokens = np.asarray(alone.tokens_BW)[:, 0]
        assert tokens[b] == together.tokens_BW[b, 0]
        assert np.all(np.delete(tokens, b) == -1), "an empty row produced a token"
        np.testing.assert_allclose(alone.logits_BV[b], together.logits_BV[b], atol=1e-4, rtol=0)


def test_each_seed_of_one_prefill_draws_what_it_draws_alone(steps):
    """Equal logits in every row, so the key alone decides: not the row, nor the last row's seed."""
    lengths = (16,) * B
    seeds = (5, 6, 7, 5, 6)
    hot = DRAWN.replace(temperature=50.0, top_p=1.0)
    params = [hot.replace(seed=seed) for seed in seeds]
    sampling = sampling_of(steps, params, lengths)
    _, together = steps.prefill(steps.params, steps.new_cache(), batch_of(steps, lengths), sampling)
    tokens = np.asarray(together.tokens_BW)[:, 0].tolist()
    assert tokens[0] == tokens[3] != tokens[1] == tokens[4] != tokens[2] != tokens[0]
    for b in range(B):
        batch = batch_of(steps, [16 if row == b else 0 for row in range(B)])
        _, alone = steps.prefill(steps.params, steps.new_cache(), batch, sampling)
        assert alone.tokens_BW[b, 0] == tokens[b]


@pytest.mark.parametrize("chunk", [1, 7, 8, 16, 44, 45, 64])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(steps, tiny_llama, chunk):
    lengths, ids = (1, 7, 16, 33, 45), tiny_llama.refs["long_prompt_ids"]
    sampling, batch = sampling_of(steps), batch_of(steps, lengths, ids=ids)
    _, whole = steps.prefill(steps.params, steps.new_cache(), batch, sampling)
    cache, got, logits = steps.new_cache(), [None] * B, [None] * B
    for start in range(0, T, chunk):
        starts = [min(start, length) for length in lengths]
        ends = [min(start + chunk, length) for length in lengths]
        batch = batch_of(steps, ends, starts, ids)
        cache, output = steps.prefill(steps.params, cache, batch, sampling)
        for b in range(B):
            if starts[b] < ends[b] == lengths[b]:
                got[b], logits[b] = int(output.tokens_BW[b, 0]), output.logits_BV[b]
    assert got == np.asarray(whole.tokens_BW)[:, 0].tolist()
    np.testing.assert_allclose(np.stack(logits), whole.logits_BV, atol=1e-5, rtol=0)


def test_prefill_and_steps_give_the_reference_ids_and_logits(steps, tiny_llama):
    cache, state, first_B = started(steps)
    _, _, tokens_BW, logits_BWV = run_steps(steps, cache, state, 15)
    assert [first_B[4], *tokens_BW[4]] == tiny_llama.refs["greedy_ids"].tolist()
    np.testing.assert_allclose(logits_BWV[4], tiny_llama.refs["step_logits"][1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_window_is_that_many_steps(steps, params):
    cache, state, tokens_BW, _ = run_steps(steps, *started(steps, params)[:2], 6)
    in_window = steps.window(steps.params, *started(steps, params)[:2], 6)
    np.testing.assert_array_equal(in_window[2].tokens_BW[:, :6], tokens_BW)
    assert np.all(np.asarray(in_window[2].tokens_BW)[:, 6:] == -1)
    for one, other in zip(jax.tree.leaves(in_window[1]), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(in_window[0].pages, cache.pages, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


def test_one_program_serves_every_window_length(steps):
    cache, state, _ = started(steps, max_tokens=80)
    _, _, wanted, _ = run_steps(steps, *started(steps, max_tokens=80)[:2], 2 * MAX_STEPS)
    got = []
    for num_steps in (3, 0, 1, 7, 5):
        cache, state, output = steps.window(steps.params, cache, state, num_steps)
        tokens_BW = np.asarray(output.tokens_BW)
        assert tokens_BW.shape == (B, MAX_STEPS)
        assert np.all(tokens_BW[:, num_steps:] == -1)
        got.append(tokens_BW[:, :num_steps])
    np.testing.assert_array_equal(np.concatenate(got, 1), wanted)
    assert steps.traced == ["window"], "a length cost a compile of its own"


def test_a_window_is_no_longer_than_max_steps(steps):
    cache, state, _ = started(steps)
    _, state, output = steps.window(steps.params, cache, state, 1000)
    assert np.all(np.asarray(output.tokens_BW) >= 0)
    assert np.asarray(state.context_lens_B).tolist() == [n + MAX_STEPS for n in LENGTHS]


def test_each_row_stops_by_itself(steps):
    """Rows 0 to 2 stop at an id or a budget of their own; 3 and 4 go on undisturbed."""
    _, _, plain, _ = run_steps(steps, *started(steps)[:2], MAX_STEPS)
    stop = int(plain[0, 2])
    assert stop not in plain[0, :2]
    params = [GREEDY.replace(stop_token_ids=[stop]), *[GREEDY] * 4]
    cache, state, _ = started(steps, params, max_tokens=[20, 2, 5, 20, 20])
    cache, state, output = steps.window(steps.params, cache, state, MAX_STEPS)
    tokens_BW = np.asarray(output.tokens_BW)
    lengths = [3, 1, 4, MAX_STEPS, MAX_STEPS]
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(tokens_BW[b, :length], plain[b, :length])
        assert np.all(tokens_BW[b, length:] == -1)
    assert np.asarray(state.remaining_B).tolist() == [0, 0, 0, 11, 11]
    assert np.asarray(state.sampling.num_output_B).tolist() == [n + 1 for n in lengths]
    again = steps.window(steps.params, cache, state, 2)[2]
    assert (np.asarray(again.tokens_BW)[:, :2] >= 0).all(axis=1).tolist() == [False] * 3 + [
        True
    ] * 2


def test_a_window_ends_when_all_rows_have(steps):
    cache, state, _ = started(steps, max_tokens=3)
    _, state, output = steps.window(steps.params, cache, state, MAX_STEPS)
    assert (np.asarray(output.tokens_BW) >= 0).sum(axis=1).tolist() == [2] * B
    assert np.asarray(state.context_lens_B).tolist() == [n + 2 for n in LENGTHS]


def test_inactive_rows_change_nothing(steps):
    cache, state, _ = started(steps)
    state = dataclasses.replace(state, remaining_B=state.remaining_B.at[jnp.array([1, 3])].set(0))
    before = jax.tree.map(np.asarray, (cache, state))
    cache, state, output = steps.step(steps.params, cache, state)
    assert np.asarray(output.tokens_BW)[[1, 3], 0].tolist() == [-1, -1]
    for old, new in zip(*map(jax.tree.leaves, (before[1], state)), strict=True):
        np.testing.assert_array_equal(old[[1, 3]], np.asarray(new)[[1, 3]])
    written = {TABLE_BM[b, LENGTHS[b] // PAGE] for b in (0, 2, 4)}
    untouched = sorted(set(range(NUM_PAGES)) - written)
    for old, new in zip(before[0].pages, cache.pages, strict=True):
        np.testing.assert_array_equal(old[untouched], np.asarray(new)[untouched])


def test_unmapped_entries_never_change_a_page(steps):
    """Every row is mapped nowhere: what it writes must be dropped, not wrapped to the last page."""
    nowhere = np.full_like(TABLE_BM, NUM_PAGES)
    batch = dataclasses.replace(batch_of(steps), page_table_BM=nowhere)
    marked = KVCache(tuple(jnp.full_like(layer, 3.0) for layer in steps.new_cache().pages))
    cache, _ = steps.prefill(steps.params, marked, batch, sampling_of(steps))
    _, state, _ = started(steps)
    state = dataclasses.replace(state, page_table_BM=jnp.asarray(nowhere))
    cache, state, _ = steps.step(steps.params, cache, state)
    cache, _, _ = steps.window(steps.params, cache, state, 3)
    for layer in cache.pages:
        assert np.all(np.asarray(layer) == 3.0)


def test_nan_in_unused_slots_changes_nothing(steps):
    def poisoned(cache, lengths):
        used = np.zeros((NUM_PAGES, PAGE), bool)
        for pages, length in zip(TABLE_BM, lengths):
            for position in range(length):
                used[pages[position // PAGE], position % PAGE] = True
        unused = jnp.asarray(~used)[:, None, :, None]
        return KVCache(tuple(jnp.where(unused, jnp.nan, layer) for layer in cache.pages))

    clean_cache, clean_state, first_B = started(steps)
    *_, wanted, wanted_logits = run_steps(steps, clean_cache, clean_state, 4)
    sampling = sampling_of(steps)
    cache, output = steps.prefill(
        steps.params, poisoned(steps.new_cache(), [0] * B), batch_of(steps), sampling
    )
    np.testing.assert_array_equal(output.tokens_BW[:, 0], first_B)
    assert np.isfinite(output.logits_BV).all()
    _, state, _ = started(steps)
    for step in range(4):
        cache = poisoned(cache, [length + step for length in LENGTHS])
        cache, state, output = steps.step(steps.params, cache, state)
        np.testing.assert_array_equal(output.tokens_BW[:, 0], wanted[:, step])
        np.testing.assert_array_equal(output.logits_BV, wanted_logits[:, step])


def test_steps_take_over_the_buffers_that_they_are_given(steps):
    cache = steps.new_cache()
    new_cache, _ = steps.prefill(steps.params, cache, batch_of(steps), sampling_of(steps))
    assert all(layer.is_deleted() for layer in cache.pages)
    assert not any(layer.is_deleted() for layer in new_cache.pages)
    for step in (steps.step, functools.partial(steps.window, num_steps=2)):
        cache, state, _ = started(steps)
        step(steps.params, cache, state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((cache, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(steps.params))


@pytest.mark.parametrize(
    "token, max_tokens, remaining", [(7, 20, 19), (7, 1, 0), (EOS, 20, 0), (9, 20, 0), (-1, 20, 0)]
)
def test_a_row_starts_with_what_is_left_of_its_budget(steps, token, max_tokens, remaining):
    params = SamplingParams(temperature=0.0, stop_token_ids=[9])
    sampling = sampling_of(steps, params)
    tokens_B = jnp.full(B, token, jnp.int32)
    max_tokens_B = jnp.full(B, max_tokens, jnp.int32)
    state = steps.start(batch_of(steps), sampling, tokens_B, max_tokens_B)
    assert state.remaining_B.tolist() == [remaining] * B
    assert state.sampling.num_output_B.tolist() == [int(token >= 0)] * B
    assert state.remaining_B.dtype == jnp.int32

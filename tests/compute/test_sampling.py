import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compute import noise
from jaxinfer.compute.cutoff import NUM_CANDIDATES, TOP_P_SLACK
from jaxinfer.compute.logits import apply_hook, process_logits
from jaxinfer.compute.logprobs import sampled_log_probs
from jaxinfer.compute.sampling import advance, sample
from jaxinfer.compute.sampling_state import make_sampling_state
from jaxinfer.sampling_params import SamplingParams

from . import sampling_oracle as oracle

# Few shapes, so that the file compiles little: ROWS x SMALL or LARGE, with fewer valid ids at need.
ROWS, SMALL, LARGE = 8, 272, 5000


@pytest.fixture(scope="module")
def traced():
    """The shapes that the compiled sampler was traced for."""
    return []


@pytest.fixture(scope="module")
def draw(traced):
    """`sample`, compiled."""

    @jax.jit
    def step(logits_BV, state, positions_B):
        traced.append(logits_BV.shape)
        return sample(logits_BV, state, positions_B)

    return lambda *args: np.asarray(step(*args))


@pytest.fixture(scope="module")
def log_probs_of():
    """`sampled_log_probs`, compiled."""
    step = jax.jit(sampled_log_probs)
    return lambda *args: np.asarray(step(*args))


def state_of(params, vocab=SMALL, prompts=None, **more):
    """State of `params` in the first rows, the last of them repeated in the others."""
    params = [*params, *[params[-1]] * (ROWS - len(params))]
    prompts = [[1]] * len(params) if prompts is None else prompts
    return make_sampling_state(params, prompts, vocab_size=vocab, **more)


def logits_of(rows, vocab=SMALL):
    """Logits [ROWS, vocab] that begin with `rows`, the last of them repeated; 9 where padded."""
    logits = np.full((ROWS, vocab), 9.0, np.float32)
    for row in range(ROWS):
        values = rows[min(row, len(rows) - 1)]
        logits[row, : len(values)] = values
    return logits


def positions(start=0):
    return np.arange(start, start + ROWS, dtype=np.int32)


def seeded(**fields):
    return [SamplingParams(seed=seed, **fields) for seed in range(ROWS)]


def random_params(rng, vocab, seed):
    """One row of random parameters, each feature off about half of the time."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    ids = rng.permutation(vocab)
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(
            rng.choice([-1, 0, 1, 5, 50, NUM_CANDIDATES, NUM_CANDIDATES + 40, vocab, vocab + 5])
        ),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.7, 0.2, 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5])),
        repetition_penalty=maybe(1.3, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.4, 0.0),
        logit_bias=maybe({int(v): float(rng.normal()) for v in ids[:5]}, None),
        allowed_token_ids=maybe(ids[: vocab // 2 + 1].tolist(), None),
        bad_words=maybe([[3], [2, 4], [9, 1, 2, 5]], None),
        min_tokens=maybe(4, 0),
        stop_token_ids=maybe([7, 8], None),
        seed=seed,
    )


def gap_of_best(probs, key, position):
    """The Gumbel-max token of `probs`, and how far ahead of the next it is."""
    ids = np.arange(len(probs), dtype=np.int32)[None]
    gumbel = np.asarray(noise.gumbel(key[None], np.int32([position]), ids, noise.SAMPLE))[0]
    noisy = np.log(probs, where=probs > 0, out=np.full(len(probs), -np.inf)) + gumbel
    best = int(np.argmax(noisy))
    others = np.delete(noisy, best)
    return best, noisy[best] - others.max()


@pytest.mark.parametrize("case", [(SMALL, 97, 2.0), (SMALL, 272, 0.3), (LARGE, 5000, 1.0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixed_batch_equals_the_oracle(draw, log_probs_of, case, seed):
    vocab, valid, spread = case
    rng = np.random.default_rng(seed)
    params = [random_params(rng, valid, seed=row) for row in range(ROWS)]
    prompts = [rng.integers(0, valid, 12).tolist() for _ in params]
    outputs = [[6, 9, 1, 2][: row % 5] + [2] * (row % 3) for row in range(ROWS)]
    # A coarse grid of logits makes many ties.
    logits = (np.round(spread * rng.standard_normal((ROWS, vocab)) * 4) / 4).astype(np.float32)
    state = state_of(params, vocab, prompts, outputs=outputs, eos_ids=(0,), num_valid_ids=valid)
    log_probs = log_probs_of(logits, state)
    tokens = draw(logits, state, positions(30))
    for row, p in enumerate(params):
        processed = oracle.process(logits[row, :valid], p, prompts[row], outputs[row], eos_ids=(0,))
        expected = np.zeros(vocab)
        expected[:valid] = oracle.distribution(processed, p, slack=float(TOP_P_SLACK))
        np.testing.assert_array_equal(log_probs[row] > -np.inf, expected > 0)
        np.testing.assert_allclose(np.exp(log_probs[row]), expected, atol=1e-5)
        best, gap = gap_of_best(expected, state.key_B2[row], 30 + row)
        assert tokens[row] == best or gap < 1e-5


def test_a_flat_row_is_cut_exactly_beyond_the_candidates(log_probs_of):
    assert LARGE > 4 * NUM_CANDIDATES
    params = [SamplingParams(top_p=0.9, seed=0), SamplingParams(top_k=300, seed=0)]
    log_probs = log_probs_of(np.zeros((ROWS, LARGE), np.float32), state_of(params, LARGE))
    assert np.flatnonzero(log_probs[0] > -np.inf).tolist() == list(range(4500))
    assert np.flatnonzero(log_probs[1] > -np.inf).tolist() == list(range(300))
    np.testing.assert_allclose(log_probs[0, 0], -np.log(4500), rtol=1e-6)


@pytest.mark.parametrize("fields", [{"top_p": 0.2}, {"min_p": 0.3}, {"top_p": 0.2, "min_p": 0.1}])
def test_a_top_k_beyond_the_candidates_with_a_cut_among_them(log_probs_of, fields):
    params = SamplingParams(top_k=4 * NUM_CANDIDATES, seed=0, **fields)
    logits = np.random.default_rng(5).standard_normal((ROWS, LARGE)).astype(np.float32)
    log_probs = log_probs_of(logits, state_of([params], LARGE))
    for row in range(ROWS):
        expected = oracle.distribution(logits[row], params, slack=float(TOP_P_SLACK))
        assert 1 < np.count_nonzero(expected) < NUM_CANDIDATES
        np.testing.assert_array_equal(log_probs[row] > -np.inf, expected > 0)
        np.testing.assert_allclose(np.exp(log_probs[row]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "probs, fields, expected",
    [
        ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.4}, [0, 1]),
        ([0.3, 0.25, 0.2, 0.15, 0.1], {"top_k": 2, "top_p": 0.5}, [0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.8}, [0, 1, 2]),
        ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.75}, [0, 1]),
        ([0.5, 0.4, 0.1], {"top_p": 0.9}, [0, 1]),
        ([0.9, 0.06, 0.04], {"top_p": 1.0}, [0, 1, 2]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 1}, [0]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 3}, [0, 1, 2]),
        ([0.3, 0.7], {"top_p": 1e-12}, [1]),
        ([0.3, 0.3, 0.4], {"min_p": 1.0}, [2]),
        ([0.3, 0.3, 0.4], {"temperature": 0.0}, [2]),
        # Logits 3, 2, 1: {0} with the temperature first, {0, 1} with it last.
        (np.exp([3.0, 2.0, 1.0]), {"temperature": 0.5, "top_p": 0.8}, [0]),
    ],
)
def test_what_filters_keep(log_probs_of, probs, fields, expected):
    state = state_of([SamplingParams(seed=0, **fields)], num_valid_ids=len(probs))
    log_probs = log_probs_of(logits_of([np.log(probs)]), state)
    assert np.flatnonzero(log_probs[0] > -np.inf).tolist() == expected
    assert abs(np.exp(log_probs[0]).sum() - 1) < 1e-6


def test_top_p_of_one_is_no_top_p(draw, log_probs_of):
    logits = np.random.default_rng(0).standard_normal((ROWS, SMALL)).astype(np.float32)
    plain, one = state_of(seeded()), state_of(seeded(top_p=1.0, top_k=-1))
    assert (log_probs_of(logits, one) > -np.inf).all()
    for start in range(20):
        np.testing.assert_array_equal(
            draw(logits, one, positions(start)), draw(logits, plain, positions(start))
        )


@pytest.mark.parametrize("top_k", [-1, 0, 16, 21])
def test_top_k_off_in_every_spelling(draw, top_k):
    logits = np.zeros((ROWS, SMALL), np.float32)
    state = state_of(seeded(top_k=top_k), num_valid_ids=16)
    off = state_of(seeded(), num_valid_ids=16)
    seen = set()
    for start in range(0, 200, ROWS):
        tokens = draw(logits, state, positions(start))
        seen |= set(tokens.tolist())
        np.testing.assert_array_equal(tokens, draw(logits, off, positions(start)))
    assert len(seen) >= 12


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-45, 1e-20])
def test_zero_and_tiny_temperatures_are_argmax(draw, temperature):
    tiny = [SamplingParams(temperature=temperature, seed=seed) for seed in (0, 1)]
    state = state_of([*tiny, SamplingParams(temperature=2.0, seed=1)], num_valid_ids=3)
    logits = logits_of([[1.0, 2.0, 2.0 - 1e-6], [5.0, -5.0, 4.999]])
    for start in range(10):
        assert draw(logits, state, positions(start))[:2].tolist() == [1, 0]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 1}])
def test_ties_take_the_lower_id_and_zeros_tie(draw, fields):
    state = state_of([SamplingParams(seed=0, **fields)], num_valid_ids=3)
    logits = logits_of([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0]])
    assert draw(logits, state, positions())[:2].tolist() == [1, 0]


def test_a_row_alone_equals_the_row_in_a_batch(draw):
    rng = np.random.default_rng(3)
    params = [random_params(rng, LARGE, seed=row) for row in range(ROWS)]
    prompts = [rng.integers(0, LARGE, row + 1).tolist() for row in range(ROWS)]
    spreads = rng.choice([0.2, 1.0, 5.0], (ROWS, 1))
    logits = (spreads * rng.standard_normal((ROWS, LARGE))).astype(np.float32)
    batch = state_of(params, LARGE, prompts)
    for start in (0, 100, 200):
        together = draw(logits, batch, positions(start))
        for row in range(ROWS):
            alone = make_sampling_state([params[row]], [prompts[row]], vocab_size=LARGE)
            token = draw(logits[row : row + 1], alone, np.int32([start + row]))
            assert token.tolist() == [together[row]]


def test_a_row_ignores_what_the_others_ask(draw):
    logits = np.random.default_rng(4).standard_normal((ROWS, LARGE)).astype(np.float32)
    mine = SamplingParams(top_p=0.95, seed=5)
    others = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(top_k=3, seed=1),
        SamplingParams(top_k=700, top_p=0.5, presence_penalty=1.0, bad_words=[[1]], seed=1),
    )
    for start in range(3):
        drawn = [
            draw(logits, state_of([mine, other], LARGE), positions(start))[0] for other in others
        ]
        assert len(set(drawn)) == 1


def test_draws_follow_the_distribution(draw):
    probs = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    state, logits = state_of(seeded(), num_valid_ids=5), logits_of([np.log(probs)])
    calls = 2500
    tokens = [draw(logits, state, positions(start)) for start in range(0, calls * ROWS, ROWS)]
    counts = np.bincount(np.concatenate(tokens), minlength=5)
    expected = calls * ROWS * probs
    assert ((counts - expected) ** 2 / expected).sum() < 18.47  # p = 0.001, 4 degrees of freedom


def test_every_position_draws_anew(draw):
    logits = np.zeros((ROWS, LARGE), np.float32)
    state = state_of([SamplingParams(seed=0)], LARGE, num_valid_ids=1000)
    first, again = (
        [draw(logits, state, positions(start))[0] for start in range(64)] for _ in range(2)
    )
    assert len(set(first)) >= 55
    assert first == again


def test_one_seed_over_many_prompts_is_uncorrelated(draw):
    prompts = [[row % 50, row // 50] for row in range(2000)]
    params, logits = [SamplingParams(seed=42)] * ROWS, np.zeros((ROWS, SMALL), np.float32)
    at = np.full(ROWS, 2, np.int32)
    tokens = []
    for i in range(0, len(prompts), ROWS):
        state = state_of(params, prompts=prompts[i : i + ROWS], num_valid_ids=8)
        tokens.extend(draw(logits, state, at).tolist())
    expected = len(prompts) / 8
    counts = np.bincount(tokens, minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.32  # p = 0.001, 7 degrees of freedom
    for i in (0, 777, 1999):
        state = state_of(params, prompts=[prompts[i]] * ROWS, num_valid_ids=8)
        assert set(draw(logits, state, at).tolist()) == {tokens[i]}


def test_padding_of_the_head_is_never_sampled(draw, log_probs_of):
    tokenizer = 260
    logits = np.zeros((ROWS, SMALL), np.float32)
    logits[:, 271] = 50.0
    params = [SamplingParams(temperature=row % 2, seed=row) for row in range(ROWS)]
    state = state_of(params, num_valid_ids=tokenizer)
    for start in range(20):
        assert (draw(logits, state, positions(start)) < tokenizer).all()
    assert (log_probs_of(logits, state)[:, tokenizer:] == -np.inf).all()
    assert (draw(np.full_like(logits, np.nan), state, positions()) < tokenizer).all()


def test_values_change_without_a_new_compile(draw, traced):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, SMALL)).astype(np.float32)
    for trial in range(6):
        state = state_of([random_params(rng, SMALL, seed=trial + row) for row in range(ROWS)])
        draw(logits, state, positions(trial))
        draw(jnp.asarray(logits), jax.device_put(state), jnp.asarray(positions(trial)))
    assert traced.count((ROWS, SMALL)) == 1


def test_results_have_strong_types():
    state = state_of(seeded())
    logits = jnp.zeros((ROWS, SMALL), jnp.bfloat16)
    tokens = jax.eval_shape(sample, logits, state, positions())
    assert (tokens.dtype, tokens.shape, tokens.weak_type) == (jnp.int32, (ROWS,), False)
    after = jax.eval_shape(advance, state, tokens, np.ones(ROWS, bool))
    for name, value in vars(after).items():
        assert not value.weak_type, name
        assert (value.dtype, value.shape) == (
            getattr(state, name).dtype,
            getattr(state, name).shape,
        ), name


def test_the_hook_sees_raw_float32_logits_before_the_bias():
    params = SamplingParams(temperature=0.0, logit_bias={2: 5.0})
    state = make_sampling_state([params], [[1]], vocab_size=4)
    seen = []

    def hook(logits_BV, sampling):
        seen.append((logits_BV.dtype, sampling.bias_BC.shape))
        return -logits_BV

    def step(logits_BV, state):
        tokens = sample(logits_BV, state, np.int32([0]), logits_hook=hook)
        return tokens, process_logits(apply_hook(logits_BV, state, hook), state)

    tokens, processed = jax.jit(step)(jnp.array([[1.0, 2.0, 7.0, -3.0]], jnp.bfloat16), state)
    assert seen == [(jnp.float32, state.bias_BC.shape)] * 2
    assert processed.tolist() == [[-1.0, -2.0, -2.0, 3.0]]
    assert tokens.tolist() == [3]


def run(draw, params, logits, steps, **more):
    """Tokens of row 0 over `steps`, each drawn from the same logits."""
    state = state_of([params], num_valid_ids=len(logits), **more)
    tokens, step = [], jax.jit(advance)
    for at in range(steps):
        drawn = draw(logits_of([logits]), state, positions(at))
        state = step(state, drawn, np.ones(ROWS, bool))
        tokens.append(int(drawn[0]))
    return tokens


def test_min_tokens_delays_a_preferred_eos_by_five_tokens(draw):
    params = SamplingParams(temperature=0.0, min_tokens=5)
    logits = [0, 1, 2, 3, 4, 5, 100, 6]
    assert run(draw, params, logits, 6, eos_ids=(6,)) == [7] * 5 + [6]


def test_presence_penalty_changes_greedy_output(draw):
    params = SamplingParams(temperature=0.0)
    assert run(draw, params, [1.0, 0.5, 0.0], 4) == [0, 0, 0, 0]
    assert run(draw, params.replace(presence_penalty=2.0), [1.0, 0.5, 0.0], 4) == [0, 1, 2, 0]


def test_advance_touches_active_rows_only_and_saturates():
    greedy = [SamplingParams(temperature=0.0)] * 3
    state = make_sampling_state(greedy, [[4], [5], [6]], vocab_size=10)
    tokens = jnp.int32([4, -1, 7])
    active = jnp.array([True, False, True])
    step = jax.jit(advance)
    after = step(step(state, tokens, active), tokens, active)
    assert after.num_output_B.tolist() == [2, 0, 2]
    assert after.counts_BV[0, 4] == 5 and after.counts_BV[2, 7] == 4 and after.counts_BV[2, 6] == 1
    np.testing.assert_array_equal(after.counts_BV[1], state.counts_BV[1])
    assert after.recent_BR[0].tolist() == [-1] * 6 + [4, 4]
    assert after.recent_BR[1].tolist() == [-1] * 8
    full = dataclasses.replace(state, counts_BV=np.full((3, 10), 32766, np.int16))
    assert step(full, tokens, active).counts_BV[0].tolist() == [32766] * 10


def test_advance_updates_donated_counts_in_place():
    state = jax.device_put(state_of(seeded(), 50000))
    args = (state, jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool))
    memory = jax.jit(advance, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.counts_BV.nbytes
    assert memory.temp_size_in_bytes < state.counts_BV.nbytes / 4


def test_rebuilt_state_equals_the_advanced_one():
    params = [SamplingParams(seed=3, presence_penalty=1.0)] * 2
    prompts, outputs = [[1, 2, 2], [3]], [[2, 5, 5, 9, 0, 0, 1, 2, 3], [7] * 9]
    state = make_sampling_state(params, prompts, vocab_size=12)
    step = jax.jit(advance)
    for tokens in np.transpose(np.int32(outputs)):
        state = step(state, tokens, np.ones(2, bool))
    rebuilt = make_sampling_state(params, prompts, vocab_size=12, outputs=outputs)
    for name, value in vars(rebuilt).items():
        np.testing.assert_array_equal(getattr(state, name), value, err_msg=name)

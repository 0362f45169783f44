"""`make_prefill_batch`: what lies where, and that its pages are just enough for a generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer import CacheConfig, SamplingParams, compute


def test_prompts_are_padded_and_own_their_pages():
    batch = compute.make_prefill_batch([[7, 8, 9, 10], [5]], max_tokens=5, page_size=4)
    np.testing.assert_array_equal(batch.tokens_BT, [[7, 8, 9, 10], [5, 0, 0, 0]])
    np.testing.assert_array_equal(batch.query_lens_B, [4, 1])
    np.testing.assert_array_equal(batch.context_lens_B, [4, 1])
    np.testing.assert_array_equal(batch.page_table_BM, [[0, 1, 2], [3, 4, 5]])
    assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("max_tokens, pages", [(1, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_pages_hold_prompt_and_output(max_tokens, pages):
    batch = compute.make_prefill_batch([[1, 2, 3, 4]], max_tokens=max_tokens, page_size=4)
    assert batch.page_table_BM.shape == (1, pages)


@pytest.mark.parametrize(
    "prompts, max_tokens, message",
    [
        ([], 1, r"\[\] tokens; at least one prompt"),
        ([[1], []], 1, r"\[1, 0\] tokens; at least one prompt is needed, and a token in each"),
        ([[1]], 0, "max_tokens=0 must be at least 1"),
    ],
)
def test_what_cannot_be_computed_is_refused(prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        compute.make_prefill_batch(prompts, max_tokens=max_tokens)


def test_a_scan_over_decode_steps_in_a_jit_of_ones_own(tiny_llama):
    """Another library's tokens, from a row that fills its pages to the last slot but one."""
    model = tiny_llama.model
    prompts, max_tokens = [[5], tiny_llama.refs["prompt_ids"].tolist()], 16
    batch = compute.make_prefill_batch(prompts, max_tokens=max_tokens, page_size=8)
    assert batch.page_table_BM.shape == (2, 7)  # 7 * 8 slots = 40 + 16 tokens
    greedy = SamplingParams(temperature=0.0)
    sampling = compute.make_sampling_state([greedy] * 2, prompts, vocab_size=256)
    pages = CacheConfig(num_pages=batch.page_table_BM.size, page_size=8, dtype="float32")

    @functools.partial(jax.jit, donate_argnums=1)
    def complete(params, cache, batch, sampling):
        def step(carry, _):
            cache, state, output = compute.decode_step(model, params, *carry)
            return (cache, state), output.tokens_BW[:, 0]

        cache, first = compute.prefill_step(model, params, cache, batch, sampling)
        first_B = first.tokens_BW[:, 0]
        state = compute.start_decode(batch, sampling, first_B, jnp.full(2, max_tokens))
        (cache, _), rest_WB = lax.scan(step, (cache, state), length=max_tokens - 1)
        return cache, jnp.concatenate([first_B[None], rest_WB])

    cache = compute.init_cache(model.config, pages)
    _, tokens_WB = complete(tiny_llama.params, cache, batch, sampling)
    np.testing.assert_array_equal(tokens_WB[:, 1], tiny_llama.refs["greedy_ids"])

"""A loaded model computes what the reference computed: loader and decoder mean the same tree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load, open_checkpoint
from jaxinfer.compute import init_cache
from jaxinfer.config import CacheConfig


@partial(jax.jit, static_argnums=0)
def run(model, params, cache, ids_BT, length_B):
    table_BM = jnp.arange(4, dtype=jnp.int32)[None]
    _, x_BTD = model(params, cache, ids_BT, table_BM, length_B, length_B)
    return model.unembed(params, x_BTD[0])


def logits_of(model, params, ids):
    """`[T, V]` logits of one sequence, in one pass (padded to 100 tokens, to compile only once)."""
    cache = init_cache(model.config, CacheConfig(num_pages=4, page_size=32, dtype="float32"))
    length = len(ids)
    padded = np.zeros((1, 100), np.int32)
    padded[0, :length] = ids
    return np.asarray(run(model, params, cache, padded, np.array([length], np.int32)))[:length]


def test_logits_of_both_formats_equal_the_reference(tiny, tiny_tensors, tiny_refs, write_gguf):
    """40 and 100 tokens, of which most lie beyond the 64 that the rope was first made for."""
    model, params = load(tiny, dtype="float32")
    ids, long_ids = tiny_refs["prompt_ids"], tiny_refs["long_prompt_ids"]
    np.testing.assert_allclose(logits_of(model, params, ids), tiny_refs["logits_f64"], atol=1e-5)
    long_logits = logits_of(model, params, long_ids)[-1]
    np.testing.assert_allclose(long_logits, tiny_refs["long_final_logits"], atol=1e-5)

    path = write_gguf(open_checkpoint(tiny).config, tiny_tensors)
    divisors = open_checkpoint(path).config.rope.long_factor
    assert min(divisors) == 1.0 and max(divisors) == 8.0
    same, same_params = load(path, dtype="float32")
    np.testing.assert_allclose(
        logits_of(same, same_params, long_ids)[-1], tiny_refs["long_final_logits"], atol=1e-5
    )


@pytest.mark.parametrize("head_dim", [8, 16])
def test_gguf_logits_equal_those_of_safetensors(make_model, write_gguf, head_dim):
    folder, config, tensors = make_model(head_dim)
    ids = np.random.default_rng(0).integers(0, 96, 50)
    expected = logits_of(*load(folder, dtype="float32"), ids)
    actual = logits_of(*load(write_gguf(config, tensors), dtype="float32"), ids)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert np.ptp(expected) > 1

"""What the compiled decode window holds: no copy of the cache or of a weight, donation realised."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import CacheConfig, SamplingParams
from jaxinfer.bench.compiled import bytes_of, compile_for
from jaxinfer.compute import Decoder, DecodeState, decode_window, init_cache, make_sampling_state
from jaxinfer.models import NAMED_SHAPES

ROWS, PAGES_PER_SEQ = 8, 16
# Its layers are alike: four of the thirty show what each of them does.
CONFIG = dataclasses.replace(NAMED_SHAPES["smollm2-135m"], num_layers=4)


@pytest.fixture(scope="module")
def compiled():
    """The window of 8 rows of SmolLM2-135M's layers in bfloat16, compiled from shapes alone."""
    model = Decoder(CONFIG)
    params = jax.eval_shape(functools.partial(model.init, dtype="bfloat16"), jax.random.key(0))
    cache_config = CacheConfig(num_pages=ROWS * PAGES_PER_SEQ, dtype="bfloat16")
    cache = jax.eval_shape(lambda: init_cache(CONFIG, cache_config))
    sampling = make_sampling_state(
        [SamplingParams()] * ROWS, [[1]] * ROWS, vocab_size=CONFIG.vocab_size
    )
    per_row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    table = jax.ShapeDtypeStruct((ROWS, PAGES_PER_SEQ), jnp.int32)
    state = DecodeState(per_row, per_row, per_row, table, jax.eval_shape(lambda: sampling))
    step = jax.jit(functools.partial(decode_window, model), donate_argnums=(1, 2))
    num_steps = jax.ShapeDtypeStruct((), jnp.int32)
    return compile_for("cpu", step, params, cache, state, num_steps), params, cache


def test_temporaries_are_small(compiled):
    program, *_ = compiled
    assert program.temp_bytes <= 4e6


def test_the_cache_is_updated_in_place(compiled):
    program, _, cache = compiled
    assert program.alias_bytes >= bytes_of(cache)


def test_no_float32_copy_of_a_cache_or_a_weight(compiled):
    """Results of operations, so an argument or a fused intermediate does not count."""
    program, params, cache = compiled
    in_memory = [
        result
        for result in program.results
        if result.operation != "parameter" and not re.search("fused|ynn", result.computation)
    ]
    computed = [
        math.prod(shape) for result in in_memory for dtype, shape in result.arrays if dtype == "f32"
    ]
    assert computed
    weights = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    smallest = min(leaf.size for leaf in (*weights, *cache.pages))
    logits = ROWS * CONFIG.vocab_size
    assert logits > smallest
    assert {size for size in computed if size >= smallest} <= {logits}

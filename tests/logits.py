"""Logits of whole prompts by the decoder alone, in chunks of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import CacheConfig
from jaxinfer.compute import init_cache

PAGE = 8
TABLE = jnp.asarray(np.random.default_rng(0).permutation(16)[None], jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def forward(model, params, cache, tokens_BT, context_lens_B, query_lens_B):
    cache, x_BTD = model(params, cache, tokens_BT, TABLE, context_lens_B, query_lens_B)
    return cache, model.unembed(params, x_BTD)


def logits_in_chunks(model, params, ids, chunk, *, width=None, stacked=False):
    """Logits of every position of `ids`, computed `chunk` tokens at a time in calls of `width`
    tokens.
    """
    cache = init_cache(
        model.config, CacheConfig(num_pages=16, page_size=PAGE, dtype="float32"), stacked=stacked
    )
    rows = []
    for start in range(0, len(ids), chunk):
        part = np.zeros((1, width or chunk), np.int32)
        count = min(chunk, len(ids) - start)
        part[0, :count] = ids[start : start + count]
        cache, logits = forward(
            model, params, cache, part, jnp.array([start + count]), jnp.array([count])
        )
        rows.append(np.asarray(logits)[0, :count])
    return np.concatenate(rows)
